"""Amounts as text."""


def bytes_text(count: float) -> str:
    """``count`` bytes in the decimal units in which disks are sold: ``950 B``, ``12.5 MB``."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"
