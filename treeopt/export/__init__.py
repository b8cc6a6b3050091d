"""Heads, trees and settings to and from the engines that serve them."""
