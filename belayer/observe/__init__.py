"""Where time goes, told to whoever watches: Prometheus metrics, OpenTelemetry spans, and where a log line stands.

Invariant: nobody watching costs nothing but a look at an empty tuple, and an observer never changes what it observes.
`belayer.observe.metrics` and `belayer.observe.tracing` are the two observers there are; both need an extra package and
are imported only by whoever turns them on.
"""
