"""Common prefixes by bisection, against the obvious loop."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from policies.prefix import common_prefix, n_tokens, shared_entries

TOKENS = st.lists(st.sampled_from([0, 1, 256, 2**31 - 1, -1]), max_size=40)


def pack(tokens: list[int]) -> bytes:
    """Packed little-endian int32."""
    return array("i", tokens).tobytes()


def by_hand(a: list[int], b: list[int]) -> int:
    """The same, one by one."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(TOKENS, TOKENS, TOKENS)
def test_common_prefix_is_the_longest(shared: list[int], a: list[int], b: list[int]) -> None:
    left, right = shared + a, shared + b
    assert common_prefix(pack(left), pack(right)) == by_hand(left, right) >= len(shared)


def test_tokens_that_share_only_bytes_are_different() -> None:
    """0x0100 and 0x0101 agree in three of four bytes; that is no token in common."""
    assert common_prefix(pack([7, 0x0100]), pack([7, 0x0101])) == 1
    assert common_prefix(pack([7, 0x01000000]), pack([7, 0x02000000])) == 1


@given(TOKENS)
def test_n_tokens(tokens: list[int]) -> None:
    assert n_tokens(pack(tokens)) == len(tokens)


@given(TOKENS, TOKENS, TOKENS)
def test_shared_entries_of_hash_chains(shared: list[int], a: list[int], b: list[int]) -> None:
    """An entry of a chain stands for all before it: chains agree up to where their sources do."""
    left, right = shared + a, shared + b
    chains = [tuple(repr(source[: i + 1]).encode() for i in range(len(source))) for source in (left, right)]
    assert shared_entries(*chains) == by_hand(left, right)
