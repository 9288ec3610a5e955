"""OpenTelemetry spans of this process's steps. Needs `pip install 'belayer[metrics]'`, the API alone.

    with observing(Tracing()):
        ...

Where spans go is the program's own choice: without an SDK the API drops them. A step inside another one, in the same
task, is its child; a step in the program's own span is that span's child.
"""

from __future__ import annotations

from opentelemetry import context, trace

from belayer.observe.steps import Ended, Fields


class Tracing:
    """An observer that makes each step a span `belayer.<step>`, its fields attributes `belayer.<field>`."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("belayer", tracer_provider=provider)

    def begin(self, step: str, fields: Fields) -> Ended:
        attributes = {f"belayer.{name}": value for name, value in fields.items()}
        span = self._tracer.start_span(f"belayer.{step}", attributes=attributes)
        token = context.attach(trace.set_span_in_context(span))

        def ended(took_s: float, error: BaseException | None) -> None:
            context.detach(token)
            span.set_attribute("belayer.took_s", took_s)
            if error is not None:
                span.record_exception(error)
                span.set_status(trace.StatusCode.ERROR, str(error))
            span.end()

        return ended

    def count(self, what: str, amount: float) -> None:
        trace.get_current_span().set_attribute(f"belayer.{what}", amount)
