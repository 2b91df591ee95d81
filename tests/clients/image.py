"""Reads image files: format, size and colours."""
import struct
import zlib


def describe(data):
    """Returns (format, width, height) of a PNG, JPEG or WebP file; asserts that its length matches the header."""
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        assert data[-12:] == b"\0\0\0\0IEND\xaeB`\x82", "the PNG does not end"
        return ("png", *struct.unpack(">II", data[16:24]))
    if data[:3] == b"\xff\xd8\xff":
        assert data[-2:] == b"\xff\xd9", "the JPEG does not end"
        at = 2
        while True:
            marker, length = struct.unpack(">HH", data[at:at + 4])
            if marker in (0xFFC0, 0xFFC1, 0xFFC2):
                height, width = struct.unpack(">HH", data[at + 5:at + 9])
                return "jpeg", width, height
            at += 2 + length
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        assert struct.unpack("<I", data[4:8])[0] + 8 == len(data), "the WebP is not whole"
        if data[12:16] == b"VP8L":
            bits = struct.unpack("<I", data[21:25])[0]
            return "webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        if data[12:16] == b"VP8X":
            return "webp", int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
        return "webp", struct.unpack("<H", data[26:28])[0] & 0x3FFF, struct.unpack("<H", data[28:30])[0] & 0x3FFF
    raise AssertionError(f"not an image: {data[:20]!r}")


def colours(data):
    """Returns the distinct pixels, as triples, of a non-interlaced 8-bit RGB PNG."""
    at, packed, header = 8, b"", None
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        body = data[at + 8:at + 8 + length]
        header, packed = (body if kind == b"IHDR" else header), packed + (body if kind == b"IDAT" else b"")
        at += 12 + length
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    assert (depth, colour, interlaced) == (8, 2, 0), "another kind of PNG"
    raw, stride, found = zlib.decompress(packed), 3 * width, set()
    above = bytearray(stride)
    for y in range(height):
        kind, line = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1:(y + 1) * (stride + 1)])
        for x in range(stride):
            a, b, c = (line[x - 3] if x > 2 else 0), above[x], (above[x - 3] if x > 2 else 0)
            nearest = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]  # Paeth's
            line[x] = line[x] + (0, a, b, (a + b) // 2, nearest)[kind] & 255
        found.update(zip(line[0::3], line[1::3], line[2::3]))
        above = line
    return found
