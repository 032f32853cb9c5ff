"""What `--help` shows, where typer's own form would mislead."""

from typing import Any


def tidy_help(command: Any) -> None:
    """Change how the help of `command` and of the commands below it is shown.

    Flags take no value, so no type stands beside them; and paragraphs are filled to the width of the terminal, not
    broken where the docstring breaks its lines.

    Args:
        command: as `typer.main.get_command` makes it.
    """
    if command.help:
        command.help = "\n\n".join(" ".join(part.split()) for part in command.help.split("\n\n"))
    for parameter in command.params:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    make_help_option = command.get_help_option

    def help_option(context: Any) -> Any:
        option = make_help_option(context)
        if option is not None:
            option.metavar = ""
        return option

    command.get_help_option = help_option
    for child in getattr(command, "commands", {}).values():
        tidy_help(child)
