"""Longest common prefixes: of token sequences, packed as little-endian int32, of hash chains, of texts."""

TOKEN_BYTES = 4


def n_tokens(packed: bytes) -> int:
    """Number of tokens in a packed sequence."""
    return len(packed) // TOKEN_BYTES


def common_prefix(a: bytes, b: bytes) -> int:
    """Tokens that two packed sequences share from the start; O(log n) comparisons of memory."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    left, right = memoryview(a), memoryview(b)
    while low < high:
        middle = (low + high + 1) // 2
        start, stop = low * TOKEN_BYTES, middle * TOKEN_BYTES
        low, high = (middle, high) if left[start:stop] == right[start:stop] else (low, middle - 1)
    return low


def shared_entries(a: tuple[bytes, ...], b: tuple[bytes, ...]) -> int:
    """Entries that two hash chains share from the start (each entry covers all before it, so bisection is enough)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[middle - 1] == b[middle - 1] else (low, middle - 1)
    return low


def common(a: str, b: str) -> int:
    """Characters that two texts share from the start; bisection, because comparing slices is fast and loops are not."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
