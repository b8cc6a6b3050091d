"""A program whose process is killed in the middle of a write: source text to put in front of the program's."""

from __future__ import annotations

# The first argument is the number of bytes of temporary files after which SIGKILL ends the process; 0 never.
TORN = """
import os, signal, sys

left, opened = int(sys.argv.pop(1)) or 10**9, os.fdopen

class Torn:
    def __init__(self, stream):
        self.stream = stream
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.stream.close()
    def __getattr__(self, name):
        return getattr(self.stream, name)
    def writelines(self, parts):
        for part in parts:
            self.write(part)
    def write(self, content):
        global left
        self.stream.write(content[:left])
        left -= len(content)
        if left <= 0:
            self.stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)

def torn(handle, mode="r", *rest, **options):
    stream = opened(handle, mode, *rest, **options)
    return Torn(stream) if mode == "wb" else stream

os.fdopen = torn
"""
