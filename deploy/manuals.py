#!/usr/bin/python3
"""Manual pages and completion for bash and zsh, from what the programs themselves print with --help.

Usage: deploy/manuals.py [--bin DIR] [--out DIR]: DIR/man/NAME.SECTION, DIR/bash/NAME and DIR/zsh/_NAME of each program.
"""

import argparse
import datetime
import os
import pathlib
import re
import subprocess
from dataclasses import dataclass, field

SECTIONS = {"qkvd": 8, "qkvctl": 1, "qkv-worker": 1, "qkv-bench": 1}
OPTION = re.compile(r"^  (--[a-z0-9-]+)(?: ([^\s].*?))?(?:\s{2,}(\S.*))?$")
COMMAND = re.compile(r"^  ([a-z][a-z-]*)(?: (\S.*?))?\s{2,}(\S.*)$")
FILES = {"FILE", "PATH", "MODEL=FILE"}
FOLDERS = {"DIR", "DIRECTORY"}


@dataclass
class Option:
    name: str
    value: str | None
    text: str


@dataclass
class Command:
    name: str  # "" for a program without commands
    arguments: str
    text: str
    options: list[Option] = field(default_factory=list)


def printed(program, *words):
    """What --help prints, whatever the terminal and the environment are."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("QKV")} | {"COLUMNS": "96"}
    done = subprocess.run([program, *words, "--help"], check=True, capture_output=True, text=True, env=environment)
    return done.stdout.splitlines()


def options_of(lines):
    """The rows of a list of options; a row may go on in deeper lines."""
    found = []
    for line in lines:
        match = OPTION.match(line)
        if match:
            found.append(Option(match[1], match[2], match[3] or ""))
        elif found and line.startswith("      ") and line.strip():
            found[-1].text += " " + line.strip()
        elif found and line.strip():
            break
    if not found:
        raise SystemExit("a --help has no options")
    for option in found:
        option.text = option.text.strip()
    return found


def read(program):
    """The summary, and the commands of a program, or one without a name."""
    name = program.name
    lines = printed(program)
    commands = []
    if name == "qkvd":
        return lines[0], [Command("", "", "", options_of(lines))]
    begin = lines.index("commands:")
    for line in lines[begin + 1:]:
        match = COMMAND.match(line)
        if not match:
            if line.strip():
                raise SystemExit(f"{name} --help has a line that is no command: {line}")
            break
        command = Command(match[1], match[2] or "", match[3])
        text = printed(program, command.name)
        usage = re.match(rf"usage: {name} {command.name}(.*) \[OPTIONS\]$", text[0])
        command.arguments = usage[1].strip() if usage else command.arguments
        command.options = options_of(text)
        commands.append(command)
    if not commands:
        raise SystemExit(f"{name} --help has no commands")
    return next(line for line in lines[1:] if line.strip()), commands


# ---- Manual pages ----


def roff(text):
    """Text as it is, for troff."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq").replace("~", r"\(ti").replace("^", r"\(ha")
    return r"\&" + escaped if escaped.startswith((".", r"\(aq")) else escaped


def option_lines(options):
    lines = []
    for option in options:
        value = f" \\fI{roff(option.value)}\\fR" if option.value else ""
        lines += [".TP", f"\\fB{roff(option.name)}\\fR{value}", roff(option.text)]
    return lines


def page(name, version, date, summary, commands):
    single = commands[0].name == ""
    lines = [f'.TH {name.upper()} {SECTIONS[name]} "{date}" "{name} {version}" "qkvd"', ".SH NAME",
             f"{roff(name)} \\- {roff(summary[0].lower() + summary[1:].rstrip('.'))}", ".SH SYNOPSIS"]
    lines.append(f".B {roff(name)}\n" + ("[\\fIOPTION\\fR]..." if single else "\\fICOMMAND\\fR [\\fIARGUMENTS\\fR] [\\fIOPTIONS\\fR]"))
    lines += [".SH DESCRIPTION", roff(summary)]
    if single:
        lines += [".SH OPTIONS", *option_lines(commands[0].options)]
    else:
        names = [{(one.name, one.value, one.text) for one in command.options} for command in commands]
        common = set.intersection(*names)
        lines += [".SH OPTIONS OF EVERY COMMAND"]
        lines += option_lines([one for one in commands[0].options if (one.name, one.value, one.text) in common])
        lines.append(".SH COMMANDS")
        for command in commands:
            lines += [f".SS {roff(name)} {roff(command.name)} {roff(command.arguments)}".rstrip(), roff(command.text)]
            lines += option_lines([one for one in command.options if (one.name, one.value, one.text) not in common])
    others = ", ".join(f"\\fB{roff(other)}\\fR({section})" for other, section in SECTIONS.items() if other != name)
    return "\n".join([*lines, ".SH SEE ALSO", others]) + "\n"


# ---- Completion ----


def bash(name, commands):
    function = "_" + name.replace("-", "_")
    single = commands[0].name == ""
    cases = "\n".join(f"    {command.name or '*'}) options='{' '.join(one.name for one in command.options)}' ;;"
                      for command in commands)
    every = [one for command in commands for one in command.options]
    files = sorted({one.name for one in every if one.value in FILES})
    folders = sorted({one.name for one in every if one.value in FOLDERS})
    others = sorted({one.name for one in every if one.value and one.value not in FILES | FOLDERS})
    values = ""
    for names, action in ((files, "compgen -f"), (folders, "compgen -d")):
        if names:
            values += f"    {' | '.join(names)})\n      mapfile -t COMPREPLY < <({action} -- \"$word\")\n      return\n      ;;\n"
    if others:
        values += f"    {' | '.join(others)}) return ;;\n"
    choose = "" if single else f"""  local i command=
  for ((i = 1; i < COMP_CWORD; i++)); do
    case ${{COMP_WORDS[i]}} in
      {' | '.join(command.name for command in commands)}) command=${{COMP_WORDS[i]}} && break ;;
    esac
  done
  if [[ -z $command && $word != -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W '{' '.join(command.name for command in commands)}' -- "$word")
    return
  fi
"""
    return f"""# Completion of {name} for bash, made by deploy/manuals.py.
{function}() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} options=
  compopt -o default
  case ${{COMP_WORDS[COMP_CWORD - 1]}} in
{values}  esac
{choose}  case {'x' if single else '$command'} in
{cases}
  esac
  if [[ $word == -* ]]; then mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word"); fi
}}
complete -F {function} {name}
"""


def quoted(text):
    return text.replace("\\", "").replace("'", "").replace("[", "(").replace("]", ")").replace(":", ".")


def zsh_options(options, indent):
    rows = []
    for option in options:
        value = ""
        if option.value:
            action = "_files" if option.value in FILES else "_files -/" if option.value in FOLDERS else ""
            value = f":{quoted(option.value)}:{action}"
        rows.append(f"{indent}'*{option.name}[{quoted(option.text)}]{value}'")
    return " \\\n".join(rows)


def zsh(name, commands):
    head = f"#compdef {name}\n# Completion of {name} for zsh, made by deploy/manuals.py.\n"
    if commands[0].name == "":
        return head + "_arguments \\\n" + zsh_options(commands[0].options, "  ") + "\n"
    listed = "\n".join(f"    '{command.name}:{quoted(command.text)}'" for command in commands)
    cases = "\n".join(f"    {command.name})\n      _arguments \\\n{zsh_options(command.options, '        ')} \\\n"
                      f"        '*:argument:_files'\n      ;;" for command in commands)
    return f"""{head}local -a commands
local state line
_arguments -C '1:command:->command' '*::argument:->arguments'
case $state in
  command)
    commands=(
{listed}
    )
    _describe command commands
    ;;
  arguments)
    case $line[1] in
{cases}
    esac
    ;;
esac
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", default="build/release/bin", type=pathlib.Path, help="where the programs are")
    parser.add_argument("--out", default="build/manuals", type=pathlib.Path, help="where the files go")
    given = parser.parse_args()
    # SOURCE_DATE_EPOCH: two builds give the same bytes.
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", "0")) or None
    now = datetime.datetime.now(datetime.timezone.utc)
    day = (datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc) if seconds else now).strftime("%Y-%m-%d")
    for folder in ("man", "bash", "zsh"):
        (given.out / folder).mkdir(parents=True, exist_ok=True)
    for name, section in SECTIONS.items():
        program = given.bin / name
        version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout.split()[1]
        summary, commands = read(program)
        (given.out / "man" / f"{name}.{section}").write_text(page(name, version, day, summary, commands))
        (given.out / "bash" / name).write_text(bash(name, commands))
        (given.out / "zsh" / f"_{name}").write_text(zsh(name, commands))


if __name__ == "__main__":
    main()
