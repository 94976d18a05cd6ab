"""A host for conversations that are held without an engine process."""

from producer.session import Host, Spent
from schemas.journal import PointLine


def host(lines: list[PointLine], **given) -> Host:
    """One rank whose lines go into `lines`; `given` replaces what a test wants to see or say."""

    def finish(line: PointLine) -> float:
        lines.append(line)
        return 0.0

    quiet = Host(
        clock=lambda: 0.0,
        spent=lambda: Spent(0.0, 0),
        cached_tokens=lambda spec: 0,
        exchange=lambda data: [data],
        device_state=lambda: None,
        started=lambda benchmark_id: None,
        rejected=lambda: None,
        finish=finish,
    )
    return quiet._replace(**given)
