"""The hardware model: seconds of a decode step from a model's shape and a device's peak figures."""
