"""The command `belayer`."""
