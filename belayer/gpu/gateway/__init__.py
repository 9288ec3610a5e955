"""An HTTP proxy in front of engines: callers see one unbroken stream, whatever happens behind it (docs/gateway.md)."""
