"""Print `--help` with the options of each panel in a section of its own.

typer shows `rich_help_panel` only in its rich mode, which folds examples and needs a terminal.
Arguments are shown in the usual form, FILE or [KEY]..., without the types of Python.
"""

from typing import Any

from typer.core import TyperCommand, TyperGroup

PANEL = "Connection"  # the panel of options that name nodes and credentials
VARIABLES = (
    "Each has a variable: KVSTORE_TLS_CA for --tls-ca. An option overrides its variable, which "
    "overrides the context."
)


class Command(TyperCommand):
    """A command whose help has sections."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line behind the command's name."""
        parameters = self.get_params(ctx)
        arguments = [each for each in parameters if each.param_type_name == "argument"]
        return ["[OPTIONS]", *map(_usage, arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, the command's own options, then each panel."""
        write_sections(self, ctx, formatter)


class Group(TyperGroup):
    """A group of commands whose help has sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options, then each panel, then the commands."""
        write_sections(self, ctx, formatter)
        self.format_commands(ctx, formatter)


def write_sections(command: Any, ctx: Any, formatter: Any) -> None:
    """Write a section for the arguments, the options, and each panel of options."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            kind = "Options"
            if parameter.param_type_name == "argument":
                kind, record = "Arguments", (_name(parameter), record[1])
            panel = getattr(parameter, "rich_help_panel", None) or kind
            sections.setdefault(panel, []).append(record)
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)
                if title == PANEL:
                    formatter.write_paragraph()
                    formatter.write_text(VARIABLES)


def _name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _usage(argument: Any) -> str:
    """Return an argument as it stands in a usage line: FILE, [FILE], HOST... or [KEY]..."""
    name = _name(argument) if argument.required else f"[{_name(argument)}]"
    return name if argument.nargs == 1 else f"{name}..."
