"""Sizes of files and disks in words."""


def size(nbytes: float) -> str:
    """Bytes of files and disks in decimal units with three significant digits.

    Example:
        >>> size(1_690_000_000), size(999), size(38_600_000)
        ('1.69 GB', '999 B', '38.6 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 999.5:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
