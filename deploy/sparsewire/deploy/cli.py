"""The `sparsewire` command: one function a subcommand, and what all share: logging, signals, errors, exit codes.

Exit codes: 0 done; 1 failed; 2 wrong usage or configuration; 130 and 143 stopped by SIGINT and SIGTERM, cleanly. An
error is one message on standard error that says what to do; `--debug` adds the traceback. torch and everything that
needs it is imported inside the commands, so that `sparsewire --help` is quick and works without the extras.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sparsewire.deploy.config_file import Problem, load_learner_config, load_worker_config, parse_setting
from sparsewire.deploy.processes import die_with_parent, follow_parent, write_pid_file
from sparsewire.deploy.signals import StopSignal
from sparsewire.sync.build import FORMAT_NUMBER, PROTOCOL_NUMBER, build_name
from sparsewire.sync.errors import ConfigError, SparsewireError
from sparsewire.sync.telemetry import configure_logging, redact, secret_values

app = typer.Typer(
    name="sparsewire",
    help="Weight sync for reinforcement learning across datacenters: ship only the bits that changed, verify them, "
    "apply them in place.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error, and log more.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON lines instead of text.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file of this process; options given here override it.")
]
SetValues = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override any key of the file; may be given several times."),
]
MetricsPort = Annotated[int | None, typer.Option("--metrics-port", help="Serve Prometheus metrics on this port.")]


def main() -> None:
    """Run the command line; the console entry point. Always ends the process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; errors of this package become one message on standard error."""
    debug = "--debug" in arguments
    try:
        result = app(args=arguments, prog_name="sparsewire", standalone_mode=False)
    except typer.Exit as stopped:
        return stopped.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except SparsewireError as error:
        _complain(str(error), debug=debug)
        return 2 if isinstance(error, ConfigError) else 1
    except Exception as error:  # noqa: BLE001 - the edge of the process; typer's usage errors come this way too
        if callable(show := getattr(error, "show", None)):
            show()
            return int(getattr(error, "exit_code", 2))
        _complain(f"{type(error).__name__}: {error}", debug=debug, hint=True)
        return 1
    return result if isinstance(result, int) else 0


def _complain(message: str, *, debug: bool, hint: bool = False) -> None:
    secrets = secret_values(os.environ)
    if debug:
        sys.stderr.write(redact(traceback.format_exc(), secrets))
    sys.stderr.write(f"sparsewire: {redact(message, secrets)}\n")
    if hint and not debug:
        sys.stderr.write("sparsewire: this is not an error we know; run again with --debug and report it\n")


def _logging(*, log_json: bool, debug: bool) -> None:
    configure_logging(json_lines=log_json, level=logging.DEBUG if debug else logging.INFO)


def _settings(set_values: list[str] | None, options: Mapping[str, object]) -> dict[str, object]:
    """Join `--set` values and named options; the latter win."""
    given = {key: value for key, value in options.items() if value is not None}
    return {**dict(parse_setting(text) for text in set_values or []), **given}


def _offline() -> None:
    """Keep model libraries off the network: every model is a local directory by the time it is loaded."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _until_stopped(work: Callable[[StopSignal], None]) -> int:
    """Run a process's work with signals turned into a request to stop, and return its exit code."""
    stop = StopSignal()
    with stop.installed():
        work(stop)
    return stop.exit_code or 0


@app.command(
    epilog="Example: [cyan]sparsewire learner --config learner.toml[/cyan]. "
    "Two ranks on one machine: [cyan]sparsewire learner --config learner.toml --ranks 2[/cyan]. "
    "SIGTERM ends it after the step in progress, with a checkpoint; it resumes by the same command."
)
def learner(
    config: ConfigFile = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine (FSDP2); started by torchrun.")] = 1,
    run_id: Annotated[str | None, typer.Option("--run", help="Id of the run.")] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face directory, or smollm2.")] = None,
    store: Annotated[str | None, typer.Option(help="s3://bucket/prefix or file:///directory to publish to.")] = None,
    directory: Annotated[Path | None, typer.Option(help="Where ledger, checkpoints and events live.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of the whole run.")] = None,
    metrics_port: MetricsPort = None,
    set_values: SetValues = None,
    log_json: LogJson = False,
    debug: Debug = False,
) -> int:
    """Train: lease prompts to workers, take their trajectories, step, and publish what changed."""
    _logging(log_json=log_json, debug=debug)
    _offline()
    follow_parent()
    rank = os.environ.get("RANK")
    if rank is None and ranks > 1:
        _become_torchrun(ranks, config, set_values, directory)
    if rank is not None:
        die_with_parent()
    options = {
        "run": run_id,
        "model": model,
        "store": store,
        "directory": None if directory is None else str(directory),
        "num_steps": steps,
        "metrics_port": metrics_port,
    }
    settings = load_learner_config(config, _settings(set_values, options), serving=rank in (None, "0"))
    if rank is None:
        write_pid_file(settings.directory)
    from sparsewire.trainer.loop import run_learner

    return _until_stopped(lambda stop: run_learner(settings, stop=stop.event))


def _become_torchrun(ranks: int, config: Path | None, set_values: list[str] | None, directory: Path | None) -> None:
    """Check the configuration once, then replace this process by torchrun, which starts this command `ranks` times."""
    from sparsewire.deploy.sim_plan import pick_port

    options = {"directory": None if directory is None else str(directory)}
    settings = load_learner_config(config, _settings(set_values, options))
    write_pid_file(settings.directory)
    launcher = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
    launcher += ["--master-addr=127.0.0.1", f"--master-port={pick_port(set())}"]
    command = [sys.executable, *launcher, "-m", "sparsewire.deploy.cli", *sys.argv[1:]]
    sys.stderr.flush()
    os.execv(sys.executable, command)


@app.command(
    epilog="Example: [cyan]sparsewire worker --config worker-eu.toml[/cyan]. It waits for its learner, survives its "
    "restarts, and continues from its own mirror and spool when it is started again."
)
def worker(
    config: ConfigFile = None,
    run_id: Annotated[str | None, typer.Option("--run", help="Id of the run.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Hugging Face directory of the starting weights, or smollm2.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="grpc://host:port, or the URL of a store.")] = None,
    trajectories: Annotated[str | None, typer.Option(help="host:port of the learner.")] = None,
    region: Annotated[str | None, typer.Option(help="Name of this datacenter.")] = None,
    worker_id: Annotated[str | None, typer.Option(help="Name of this worker, distinct in the run.")] = None,
    directory: Annotated[Path | None, typer.Option(help="Where mirror, spool and events live.")] = None,
    metrics_port: MetricsPort = None,
    set_values: SetValues = None,
    log_json: LogJson = False,
    debug: Debug = False,
) -> int:
    """Generate: follow the run's versions, sample prompts that the learner leases, and send trajectories home."""
    _logging(log_json=log_json, debug=debug)
    _offline()
    follow_parent()
    options = {
        "run": run_id,
        "model": model,
        "weights": weights,
        "trajectories": trajectories,
        "region": region,
        "worker_id": worker_id,
        "directory": None if directory is None else str(directory),
        "metrics_port": metrics_port,
    }
    settings = load_worker_config(config, _settings(set_values, options))
    write_pid_file(settings.directory)
    from sparsewire.rollout.loop import run_worker

    return _until_stopped(lambda stop: run_worker(settings, stop=stop.event))


@app.command(
    epilog="Examples: [cyan]sparsewire sim[/cyan] is the demo. "
    "[cyan]sparsewire sim --regions us=2,eu=80 --rate-mbit 50[/cyan] has slower links. "
    "[cyan]sparsewire sim --store 's3://bucket/prefix?endpoint_url=http://127.0.0.1:8333'[/cyan] goes over S3. "
    "Ctrl-C stops everything; no process is left."
)
def sim(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 36,
    run_id: Annotated[str | None, typer.Option("--run", help="Id of the run; by default the time of day.")] = None,
    model: Annotated[str, typer.Option(help="Hugging Face directory, or smollm2.")] = "smollm2",
    task: Annotated[str, typer.Option(help="addition, or reasoning-gym:DATASET.")] = "addition",
    ranks: Annotated[int, typer.Option(min=1, help="Processes of the learner (FSDP2).")] = 1,
    regions: Annotated[
        str, typer.Option(help="Regions with one worker each, and their round trips in milliseconds.")
    ] = "us=2,eu=80,ap=150",
    rate_mbit: Annotated[float, typer.Option(min=0.1, help="Rate of each link and direction, Mbit/s.")] = 200.0,
    store: Annotated[
        str | None, typer.Option(help="s3:// or file:// URL; without it a directory that the learner serves by gRPC.")
    ] = None,
    directory: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and samples.")] = 0,
    record_trace: Annotated[
        Path | None, typer.Option(help="Store every version's weights here, to measure codecs on.")
    ] = None,
    restart_wait: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for a process that died and may be started again by hand.")
    ] = 300.0,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65000, help="Prometheus: the learner's port; workers take the next ones.")
    ] = None,
    learner_set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A further key of learner.toml; several times.")
    ] = None,
    worker_set: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A further key of every worker's file; several times.")
    ] = None,
    no_live: Annotated[bool, typer.Option("--no-live", help="Plain lines instead of the live view.")] = False,
    debug: Debug = False,
) -> int:
    """Run a whole fleet here: a learner, and a worker in each region behind an emulated WAN link."""
    from sparsewire.deploy.sim_plan import RegionSpec, SimSettings, parse_regions
    from sparsewire.deploy.simulate import simulate

    _offline()
    known: list[Problem] = []
    region_specs: tuple[RegionSpec, ...] = ()
    further: dict[str, dict[str, object]] = {"--learner-set": {}, "--worker-set": {}}
    try:
        region_specs = parse_regions(regions)
    except ConfigError as error:
        known.append(Problem("--regions", str(error)))
    for option, texts in (("--learner-set", learner_set), ("--worker-set", worker_set)):
        for text in texts or []:
            try:
                further[option].update([parse_setting(text)])
            except ConfigError as error:
                known.append(Problem(option, str(error)))
    settings = SimSettings(
        run=run_id or f"{datetime.now(UTC):%Y%m%d-%H%M%S}",
        runs_directory=directory,
        model=model,
        task=task,
        num_steps=steps,
        ranks=ranks,
        regions=region_specs,
        bits_per_second=rate_mbit * 1e6,
        store=store,
        seed=seed,
        record_trace=record_trace,
        restart_wait=timedelta(seconds=restart_wait),
        live=not no_live,
        metrics_port=metrics_port,
        learner=further["--learner-set"],
        worker=further["--worker-set"],
    )
    stop = StopSignal()
    with stop.installed():
        return simulate(settings, stop=stop, console=console, known=known)


@app.command(
    "inspect",
    epilog="Examples: [cyan]sparsewire inspect file:///path/to/runs/r1/store --run r1[/cyan], "
    "[cyan]sparsewire inspect s3://bucket/prefix --run r1 --version 7 --json[/cyan]. S3 credentials come from the "
    "usual environment or files.",
)
def inspect_store(
    url: Annotated[str, typer.Argument(metavar="STORE_URL", help="s3://bucket/prefix, or file:///directory.")],
    run_id: Annotated[str, typer.Option("--run", help="Id of the run.")],
    version: Annotated[int | None, typer.Option(min=0, help="Take this version apart.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not rebuild the base; no counts by tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    debug: Debug = False,
) -> int:
    """Explain what a store holds: all versions of a run, or one version's chunks and tensors."""
    from sparsewire.deploy.inspection import describe_run, describe_version
    from sparsewire.deploy.inspection_tables import print_run, print_version

    if version is None:
        listing = describe_run(url, run=run_id)
        if as_json:
            print(json.dumps([asdict(summary) for summary in listing.summaries], indent=2))
        else:
            print_run(listing.summaries, console)
        for problem in listing.damaged:
            logging.getLogger(__name__).error("cannot be read: %s", problem)
        return 1 if listing.damaged else 0
    detail = describe_version(url, run=run_id, version=version, quick=quick)
    if as_json:
        print(json.dumps(asdict(detail), indent=2))
    else:
        print_version(detail, console)
    return 0


@app.command(epilog="Example: [cyan]sparsewire report runs/20260101-120000[/cyan]")
def report(
    directory: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Folder of a run, as `sim` wrote it.")],
    output: Annotated[Path | None, typer.Option(help="Where to write the page; by default into the folder.")] = None,
    debug: Debug = False,
) -> int:
    """Draw a run's summary and report again from its events."""
    from sparsewire.deploy.progress import load_progress
    from sparsewire.deploy.report import print_summary, write_report

    if not (directory / "events.jsonl").is_file():
        raise ConfigError(f"{directory} is no run folder: it has no events.jsonl; give a folder that `sim` wrote")
    progress = load_progress(directory)
    path = output or directory / "report.html"
    write_report(progress, path)
    print_summary(progress, console)
    console.print(f"report: {path}")
    return 0


@app.command()
def version() -> int:
    """Print the build, and the protocol and format numbers that peers must share."""
    facts: dict[str, Any] = {"build": build_name(), "protocol": PROTOCOL_NUMBER, "format": FORMAT_NUMBER}
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(name, str(value))
    console.print(table)
    return 0


if __name__ == "__main__":
    main()
