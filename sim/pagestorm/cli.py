"""The command line. Modules that take long to import are loaded inside the commands that need them."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pagestorm.errors import (
    Divergence,
    InvariantBroken,
    MemoryRefused,
    PagestormError,
    PoolCorruption,
    ReferenceUnavailable,
    ScenarioError,
)
from pagestorm.size_command import size_command

if TYPE_CHECKING:
    from pagestorm.catch import Found
    from pagestorm.diagnosis import Diagnosis
    from pagestorm.events import Sink
    from pagestorm.report.output import OutputFolder
    from pagestorm.report.perfetto import PerfettoTrace
    from pagestorm.report.spark import PoolUse
    from pagestorm.runs import Progress, Result
    from pagestorm.scenario import Scenario
    from pagestorm.scenario.schema import Against

OK, EXPECTATION_FAILED, BAD_INPUT, BROKEN, REFUSED, INTERRUPTED = 0, 1, 2, 3, 4, 130

EPILOG_RUN = """\b
Examples:
  pagestorm run first-retraction
  pagestorm run first-retraction --pools sim,torch --out runs/first
  pagestorm run decode-oom-page-64 --set engine.page_size=32 --json
  pagestorm run retraction-sawtooth --perfetto trace.json
"""

EPILOG_FUZZ = """\b
Examples:
  pagestorm fuzz --against step
  pagestorm fuzz --against sglang --examples 2000 --seed 7 --out found
"""


class Commands(click.Group):
    """Lists commands in the order they are written in: the main job first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExamples:\n  pagestorm run first-retraction\n  pagestorm doctor\n  pagestorm catalog gpus",
)
@click.version_option(package_name="pagestorm", message="pagestorm %(version)s")
def cli() -> None:
    """Will the KV-cache memory of an LLM server hold, what gives way first, why, and what fixes it?"""


def _shipped_scenarios(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[Any]:
    """What a shell offers for SCENARIO: the names of the shipped ones, and files."""
    from click.shell_completion import CompletionItem

    from pagestorm.scenario import shipped

    names = [CompletionItem(name) for name in sorted(shipped()) if name.startswith(begun)]
    return [*names, CompletionItem(begun, type="file")]


@cli.command(epilog=EPILOG_RUN)
@click.argument("scenario", shell_complete=_shipped_scenarios)
@click.option("--pools", help="Comma-separated: sim, counting, paged, torch. Several run in lockstep.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where the torch pool lies.")
@click.option("--payload", type=click.Choice(["stamp", "full"]), default="stamp", help="What the torch pool writes.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for tables, pictures and the report.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Instead of the scenario's.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one key, e.g. engine.page_size=32."
)
@click.option("--step", is_flag=True, help="Never leap over uneventful decode steps.")
@click.option("--events", type=click.Choice(["all", "none"]), default="all", help="none keeps summary and digest only.")
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a trace for ui.perfetto.dev to this file.",
)
@click.option("--json", "as_json", is_flag=True, help="summary.json on stdout and nothing else there.")
@click.option("--quiet", is_flag=True, help="No progress, no verdict.")
def run(
    scenario: str,
    pools: str | None,
    device: str,
    payload: str,
    out: Path | None,
    seed: int | None,
    overrides: tuple[str, ...],
    step: bool,
    events: str,
    perfetto: Path | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Simulate SCENARIO, a YAML file or the name of a shipped one, and say whether its memory holds."""
    from pagestorm.scenario import load

    changes = [*overrides, *([f"seed={seed}"] if seed is not None else [])]
    loaded = load(scenario, changes)
    names: list[str] = [name.strip() for name in pools.split(",")] if pools else list(loaded.pools)
    with _Output(loaded, out, events == "all", explain=not as_json and not quiet, perfetto=perfetto) as output:
        result = _simulate(
            loaded,
            names,
            device=device,
            payload=payload,
            step=step,
            tables=output.tables or perfetto is not None,
            sinks=output.sinks,
            quiet=quiet,
        )
        output.write(result)
    if as_json:
        click.echo(json.dumps(result.summary, indent=2))
    elif not quiet:
        output.say(result)
    if result.interrupted:
        click.echo("interrupted: what is shown covers the run up to here", err=True)
        return INTERRUPTED
    return _check_expectations(result)


@cli.command(epilog=EPILOG_FUZZ)
@click.option(
    "--against",
    required=True,
    type=click.Choice(["step", "torch", "sglang", "vllm"]),
    help="Leaping beside stepping, the torch pool beside the plain one, or our model beside the engine's own code.",
)
@click.option("--examples", type=click.IntRange(1, 10**7), default=1000, show_default=True, help="How many scenarios.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Same seed, same hunt.")
@click.option(
    "--engine",
    type=click.Choice(["sglang", "vllm"]),
    help="Whose scenarios to draw, for step and torch.  [default: sglang]",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for what is found. Left out: this one.")
@click.option("--quiet", is_flag=True, help="No progress.")
def fuzz(against: Against, examples: int, seed: int, engine: str | None, out: Path | None, quiet: bool) -> int:
    """Hunt for a scenario on which two ways to compute the same thing disagree.

    Hypothesis draws scenarios and steers them towards pressure. What parts the two sides is shrunk and saved as a
    scenario for `pagestorm replay`; then the exit code is 3 and the last line its path. Exits 1 when no scenario came
    under pressure, 2 or 4 when the engine to compare with is missing or broken (make reference).
    """
    if against in ("sglang", "vllm") and engine not in (None, against):
        raise click.UsageError(f"--against {against} draws scenarios of {against}; leave --engine out")
    if out is not None:
        _make_folder(out)
    # Hypothesis keeps notes of its own in the working folder unless it is told where; nobody reads these again.
    with tempfile.TemporaryDirectory() as notes:
        os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", notes)
        return _hunt_and_tell(against, examples, seed, engine, out, quiet)


def _hunt_and_tell(
    against: Against, examples: int, seed: int, engine: str | None, out: Path | None, quiet: bool
) -> int:
    from pagestorm.catch import as_text

    hunt, open_referee = _hunt_and_referee()
    kind = against if against in ("sglang", "vllm") else engine or "sglang"
    with _Bar(quiet) as bar, open_referee(against) as referee:
        progress = bar.counting(examples) if bar.on else None
        catch = hunt(
            against, referee, examples=examples, start=seed, engine=kind, progress=progress, on_found=_say_found
        )
    click.echo(as_text(catch))
    if catch.found is not None:
        return _save_finding(catch.found, against, out)
    if catch.interrupted:
        return INTERRUPTED
    if not catch.under_pressure:
        click.echo(
            "pagestorm: no scenario came under pressure, so this hunt proves nothing: raise --examples", err=True
        )
        return EXPECTATION_FAILED
    return OK


def _say_found(found: Found) -> None:
    click.echo(f"pagestorm: found a difference, shrinking it: {found.error}", err=True)


def _hunt_and_referee() -> tuple[Any, Any]:
    try:
        from pagestorm.hunt import hunt
        from pagestorm.referees import open_referee
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ScenarioError("fuzz needs Hypothesis: pip install 'pagestorm[test]'") from error
    return hunt, open_referee


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ScenarioError(f"cannot be made a folder: {error.strerror}; name another --out", file=str(out)) from error


def _save_finding(found: Found, against: Against, out: Path | None) -> int:
    from pagestorm.reproducer import write_reproducer

    pools = ("paged", "torch") if against == "torch" else ("counting",)
    path = write_reproducer(found.scenario, pools, False, found.error, against=against, folder=out)
    click.echo(f"pagestorm: {type(found.error).__name__}: {found.error}", err=True)
    click.echo(f"pagestorm: run it again with: pagestorm replay {path}", err=True)
    click.echo(str(path))
    return BROKEN


@cli.command(epilog="\b\nExample:\n  pagestorm replay divergence-3f2a.yaml")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
def replay(file: Path, device: str) -> int:
    """Run a saved reproducer again. Exits 3 while it still shows the fault, 0 when it no longer does."""
    from pagestorm.referees import FAULTS, open_referee
    from pagestorm.reproducer import read_reproducer

    found = read_reproducer(file)
    try:
        if found.against is None:
            _simulate(found.scenario, list(found.pools), device=device, quiet=True, reproduce=False, step=found.step)
        else:
            with open_referee(found.against) as referee:
                referee(found.scenario)
    except FAULTS as error:
        same = type(error).__name__ == found.kind
        click.echo(f"{'same verdict' if same else 'another verdict'}: {type(error).__name__}: {error}")
        return BROKEN
    click.echo(f"no longer reproduces: {found.kind} was {found.message}")
    return OK


@cli.command("compare-runs", epilog="\b\nExample:\n  pagestorm compare-runs runs/before runs/after")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Everything that differs, as one object.")
def compare_runs(a: Path, b: Path, as_json: bool) -> int:
    """Say what differs first between two output folders. Exits 0 when nothing does, else 1."""
    import shutil

    from pagestorm.report import compare

    found = compare.compare_runs(a, b)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        click.echo(compare.compared_text(found, a, b, max(40, shutil.get_terminal_size((100, 24)).columns)), nl=False)
    return OK if found.equal else EXPECTATION_FAILED


# Works, but is not shown before its figures are proven by tests of their own.
size_command.hidden = True
cli.add_command(size_command)


@cli.command(epilog="\b\nExample:\n  pagestorm schema > scenario.schema.json")
def schema() -> int:
    """Print the JSON Schema of scenarios."""
    from pagestorm.scenario import json_schema

    click.echo(json.dumps(json_schema(), indent=2))
    return OK


@cli.command(epilog="\b\nExamples:\n  pagestorm catalog gpus\n  pagestorm catalog models --json")
@click.argument("what", type=click.Choice(["models", "gpus"]))
@click.option("--json", "as_json", is_flag=True, help="Every fact, with its source.")
def catalog(what: str, as_json: bool) -> int:
    """List the models or accelerators that Pagestorm knows."""
    from pagestorm import catalog as facts

    rows = facts.models() if what == "models" else facts.gpus()
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in rows], indent=2))
        return OK
    for row in rows:
        click.echo(row.line())
    return OK


@cli.command(epilog="\b\nExample:\n  pagestorm doctor --json")
@click.option("--json", "as_json", is_flag=True)
def doctor(as_json: bool) -> int:
    """Say what this machine has: torch, CUDA, host memory, cgroup headroom, what the real pools may take."""
    from pagestorm.doctor import as_text, examine

    found = examine()
    click.echo(json.dumps(found, indent=2) if as_json else as_text(found))
    return OK


def _simulate(
    scenario: Scenario,
    pools: list[str],
    *,
    device: str,
    quiet: bool,
    payload: str = "stamp",
    step: bool = False,
    tables: bool = False,
    sinks: Sequence[Sink] = (),
    reproduce: bool = True,
) -> Result:
    from pagestorm import runs
    from pagestorm.reproducer import write_reproducer

    with _Bar(quiet) as bar, _CtrlC() as ctrl_c:
        try:
            return runs.run(
                scenario,
                pools,
                device=device,
                payload=payload,
                step=step,
                tables=tables,
                events=False,
                sinks=sinks,
                progress=bar.show,
                stop=ctrl_c.pressed,
            )
        except (Divergence, PoolCorruption, InvariantBroken) as error:
            if not reproduce:
                raise
            path = write_reproducer(scenario, runs.pool_names(pools), step, error)
            raise _Broken(error, path) from error


class _Broken(Exception):
    """A fault of Pagestorm itself, with the file that shows it."""

    def __init__(self, error: PagestormError, path: Path) -> None:
        super().__init__(str(error))
        self.error = error
        self.path = path


class _Bar:
    """A progress bar on stderr, shown only on a terminal and only when a run takes longer than a moment."""

    def __init__(self, quiet: bool) -> None:
        self.on = not quiet and sys.stderr.isatty()
        self._bar: Any = None
        self._shown = 0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def show(self) -> Callable[[Progress], None] | None:
        return self._show if self.on else None

    def counting(self, total: int) -> Callable[[int], None]:
        """Shows how many of `total` scenarios were compared."""
        from tqdm import tqdm

        self._bar = bar = tqdm(total=total, unit="scenario", delay=0.5, mininterval=0.2, leave=False)

        def show(count: int) -> None:
            bar.update(count - bar.n)

        return show

    def _show(self, progress: Progress) -> None:
        if self._bar is None:
            from tqdm import tqdm

            from pagestorm.report.progress import BAR_FORMAT

            # miniters=0: also a run in which no request ends for a while shows that it goes on.
            self._bar = tqdm(
                total=progress.requests,
                bar_format=BAR_FORMAT,
                delay=0.5,
                mininterval=0.2,
                miniters=0,
                leave=False,
                dynamic_ncols=True,
            )
        from pagestorm.report.progress import progress_words

        self._bar.set_postfix_str(progress_words(progress, self._bar.format_dict["elapsed"]), False)
        self._bar.update(progress.ended - self._shown)
        self._shown = progress.ended


class _CtrlC:
    """While it lasts, Ctrl-C asks the run to stop between two rounds, so that what is written stays whole. A second one
    stops at once."""

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def __enter__(self) -> _CtrlC:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def pressed(self) -> bool:
        return self._asked

    def _ask(self, *_: object) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True


class _Output:
    """What a run leaves: the folder of --out, opened before the run so that a bad one is told at once and events can be
    streamed into it, and the diagnosis that the verdict is drawn from."""

    def __init__(
        self, scenario: Scenario, out: Path | None, events: bool, explain: bool, perfetto: Path | None = None
    ) -> None:
        self._out = out
        self._trace: PerfettoTrace | None = None
        self._folder: OutputFolder | None = None
        self._diagnosis: Diagnosis | None = None
        self._use: PoolUse | None = None
        self.tables = out is not None and events
        self.sinks: list[Sink] = []
        if explain or out is not None:
            from pagestorm.diagnosis import Diagnosis
            from pagestorm.scenario import resolve

            self._diagnosis = Diagnosis.of(resolve(scenario))
            if events:
                self.sinks.append(self._diagnosis)
        if explain and events:
            from pagestorm.report.spark import PoolUse
            from pagestorm.scenario import resolve

            self._use = PoolUse(resolve(scenario).engine.pool_pages)
            self.sinks.append(self._use)
        if out is not None:
            from pagestorm.report import folder, tables

            self._folder = folder.open_folder(out)
            if events:
                self.sinks.append(tables.ParquetEvents(self._folder.path(folder.EVENTS)))
        if perfetto is not None:
            from pagestorm.report.perfetto import PerfettoTrace
            from pagestorm.scenario import resolve

            inside = out is not None and self._folder and perfetto.absolute().parent == out.absolute()
            place = self._folder.path(perfetto.name) if inside and self._folder else perfetto
            self._trace = PerfettoTrace(place, resolve(scenario).engine.pool_pages, scenario.name)
            self.sinks.append(self._trace)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        if self._trace is not None:
            self._trace.discard()
        if self._folder is not None:
            self._folder.discard()

    def write(self, result: Result) -> None:
        """Fill the folder and finish the trace, where there are any."""
        if self._trace is not None:
            self._trace.commit(result.timeline_rows)
        if self._out is None:
            return
        from pagestorm.report.folder import write_folder

        write_folder(
            result,
            self._out,
            command=_command_line(),
            diagnosis=self._diagnosis,
            folder=self._folder,
            tables=self.tables,
        )

    def say(self, result: Result) -> None:
        """The verdict, for a person."""
        from pagestorm.report.terminal import say

        say(result, self._out, diagnosis=self._diagnosis, use=self._use)


def _check_expectations(result: Result) -> int:
    from pagestorm.scenario import check

    failed = check(result.scenario.expect, result.summary)
    for sentence in failed:
        click.echo(f"expected: {sentence}", err=True)
    return EXPECTATION_FAILED if failed else OK


def _command_line() -> str:
    import shlex

    return shlex.join(["pagestorm", *sys.argv[1:]])


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with the code that scripts rely on."""
    sys.exit(invoke(arguments))


def invoke(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit code. Errors that a user can cause are told without a traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in words
    try:
        code = cli.main(args=words, prog_name="pagestorm", standalone_mode=False)
        return int(code or 0)
    except click.exceptions.Exit as stop:
        return int(stop.exit_code)
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        if as_json:
            click.echo(json.dumps({"error": error.format_message()}))
        error.show()
        return BAD_INPUT
    except ScenarioError as error:
        return _refuse(
            as_json, BAD_INPUT, str(error), file=error.file, line=error.line, column=error.column, key=error.key
        )
    except MemoryRefused as error:
        return _refuse(
            as_json,
            REFUSED,
            f"{error} {error.remedy}",
            needed_bytes=error.needed_bytes,
            budget_bytes=error.budget_bytes,
            file=None,
            line=None,
            key=None,
        )
    except ReferenceUnavailable as error:
        return _refuse(as_json, BAD_INPUT if error.missing else REFUSED, str(error), file=None, line=None, key=None)
    except _Broken as broken:
        click.echo(f"pagestorm: {type(broken.error).__name__}: {broken.error}", err=True)
        click.echo(f"pagestorm: run it again with: pagestorm replay {broken.path}", err=True)
        click.echo(str(broken.path))
        return BROKEN
    except (Divergence, InvariantBroken, PoolCorruption) as error:
        click.echo(f"pagestorm: {type(error).__name__}: {error}", err=True)
        return BROKEN
    except KeyboardInterrupt:
        click.echo("pagestorm: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; there is nobody left to tell.
        sys.stderr.close()
        return OK


def _refuse(as_json: bool, code: int, message: str, **where: object) -> int:
    if as_json:
        click.echo(json.dumps({"error": message, **where}))
    click.echo(f"pagestorm: {message}", err=True)
    return code
