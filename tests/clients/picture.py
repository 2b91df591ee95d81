"""What a picture's bytes say of themselves."""
import struct


def describe(data):
    """(format, width, height) of PNG, JPEG and WebP files; asserts that the file is whole as far as a header tells."""
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
    raise AssertionError(f"no picture: {data[:20]!r}")
