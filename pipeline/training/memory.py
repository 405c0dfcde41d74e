"""The largest resident size of this process since a moment, on Linux."""

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peak_memory() -> bool:
    """Begins a new measurement; False where the system does not allow that."""
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_memory() -> int | None:
    """Bytes that were resident at most since the last :func:`reset_peak_memory`; ``None`` where nobody knows."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = (int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return next((1024 * value for value in kibibytes), None)
