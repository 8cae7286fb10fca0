"""AES-256-GCM, written down a second time, in Python and from FIPS 197 and NIST SP 800-38D; slow."""

from __future__ import annotations

ROUNDS = 14
CODE_BYTES = 16
REDUCTION = 0xE1 << 120


def _times(a: int, b: int) -> int:
    """In GF(2^8) by x^8 + x^4 + x^3 + x + 1."""
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a, b = a << 1 ^ (0x11B if a & 0x80 else 0), b >> 1
    return product


def _make_sbox() -> bytes:
    def turned(x: int, n: int) -> int:
        return (x << n | x >> 8 - n) & 0xFF

    inverses = [0, *(next(y for y in range(1, 256) if _times(x, y) == 1) for x in range(1, 256))]
    return bytes(x ^ turned(x, 1) ^ turned(x, 2) ^ turned(x, 3) ^ turned(x, 4) ^ 0x63 for x in inverses)


SBOX = _make_sbox()


def _round_keys(key: bytes) -> list[bytes]:
    words, constant = [key[i : i + 4] for i in range(0, 32, 4)], 1
    for i in range(8, 4 * (ROUNDS + 1)):
        word = words[-1]
        if i % 8 == 0:
            word = bytes(SBOX[b] for b in word[1:] + word[:1])
            word = bytes([word[0] ^ constant]) + word[1:]
            constant = _times(constant, 2)
        elif i % 8 == 4:
            word = bytes(SBOX[b] for b in word)
        words.append(_xor(words[-8], word))
    return [b"".join(words[i : i + 4]) for i in range(0, len(words), 4)]


def _xor(a: bytes, b: bytes) -> bytes:
    return bytes(x ^ y for x, y in zip(a, b, strict=False))


def _mixed(column: bytes) -> bytes:
    return bytes(
        _times(column[i], 2) ^ _times(column[(i + 1) % 4], 3) ^ column[(i + 2) % 4] ^ column[(i + 3) % 4]
        for i in range(4)
    )


def _block(keys: list[bytes], text: bytes) -> bytes:
    state = _xor(text, keys[0])
    for n, key in enumerate(keys[1:], 1):
        state = bytes(SBOX[state[(i + 4 * (i % 4)) % 16]] for i in range(16))
        if n < ROUNDS:
            state = b"".join(_mixed(state[i : i + 4]) for i in range(0, 16, 4))
        state = _xor(state, key)
    return state


def _hash(subkey: int, data: bytes) -> int:
    """GHASH of whole blocks."""
    y = 0
    for at in range(0, len(data), 16):
        y ^= int.from_bytes(data[at : at + 16], "big")
        product, v = 0, subkey
        for bit in range(127, -1, -1):
            product ^= v if y >> bit & 1 else 0
            v = v >> 1 ^ (REDUCTION if v & 1 else 0)
        y = product
    return y


def _pass(key: bytes, counter: int, text: bytes, *, seals: bool) -> tuple[bytes, bytes]:
    """The text on the other side of the cipher, and its code."""
    keys = _round_keys(key)
    nonce = counter.to_bytes(12, "big")
    stream = b"".join(_block(keys, nonce + n.to_bytes(4, "big")) for n in range(1, 2 + -(-len(text) // 16)))
    out = _xor(text, stream[16:])
    hidden = out if seals else text
    padded = hidden.ljust(-(-len(hidden) // 16) * 16, b"\0")
    sizes = bytes(8) + (8 * len(hidden)).to_bytes(8, "big")
    code = _hash(int.from_bytes(_block(keys, bytes(16)), "big"), padded + sizes)
    return out, _xor(code.to_bytes(16, "big"), stream[:16])


def seal(key: bytes, counter: int, text: bytes) -> bytes:
    """Seals as the native module does: the code follows the text."""
    return b"".join(_pass(key, counter, text, seals=True))


def unseal(key: bytes, counter: int, sealed: bytes) -> bytes:
    """Raises ValueError where the code is another."""
    text, code = _pass(key, counter, sealed[:-CODE_BYTES], seals=False)
    if code != sealed[-CODE_BYTES:]:
        raise ValueError("a wrong code")
    return text
