"""The option type of every size on the command line; the parser is that of boards and recipes."""

from __future__ import annotations

import click


class Size(click.ParamType[int]):
    """``900MiB``, ``1.2GiB``, ``3GB``: bytes, as :func:`colibri_kit.config.scalars.parse_size` reads them."""

    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from colibri_kit.config.scalars import parse_size

        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ValueError as err:
            self.fail(str(err), param, ctx)
