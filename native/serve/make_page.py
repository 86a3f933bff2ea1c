"""Writes page.c from page.html: python make_page.py, after every change of the page."""

from pathlib import Path

HERE = Path(__file__).resolve().parent


def page_c(html: bytes) -> str:
    """page.html as a C string, one line of source a line of text."""
    out = ["/* page.c — made from page.html by make_page.py; do not edit. */", '#include "serve/page.h"', ""]
    out.append("const char cb_page_html[] =")
    for line in html.decode().splitlines(keepends=True):
        text = line.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("??", "?\\?")
        out.append(f'    "{text}"')
    out[-1] += ";"
    out.append("const unsigned cb_page_html_bytes = sizeof cb_page_html - 1;")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    (HERE / "page.c").write_text(page_c((HERE / "page.html").read_bytes()))
