#!/usr/bin/env python3
"""Writes html_entities.txt: the named character references of HTML 5, as Python's html.entities has them. A line is a
name as it follows '&', with ';' where it belongs to the name, and its characters' numbers in hexadecimal."""
import html.entities
from pathlib import Path

lines = [" ".join([name, *(f"{ord(c):x}" for c in text)]) for name, text in sorted(html.entities.html5.items())]
(Path(__file__).parent / "html_entities.txt").write_text("\n".join(lines) + "\n")
