"""`loopformer serve`: a model behind OpenAI's API, where each request chooses its compute."""

from pathlib import Path
from typing import Annotated

import typer

from loopformer.cli.options import DecodeDtype, Device, FastOption, ModelArgument, ModelOption, the_model
from loopformer.cli.output import stoppable


@stoppable("nothing runs any more, the same command starts again")
def serve(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8000,
    rows: Annotated[int, typer.Option(min=1, help="Texts that are generated at once.")] = 16,
    queue: Annotated[int, typer.Option(min=1, help="Texts that may wait; the next get 429.")] = 64,
    memory: Annotated[
        int | None, typer.Option(min=1, help="Bytes for keys and values; by default what all rows may need.")
    ] = None,
    degrade: Annotated[
        bool, typer.Option("--degrade", help="Grant smaller budgets while many wait, min_budget or more.")
    ] = False,
    api_keys: Annotated[
        Path | None, typer.Option(help="A file of keys, one a line, that clients must have.")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="An origin whose pages may ask; may be given several times.")
    ] = None,
    max_prompt: Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt at most; the context.")] = None,
    max_output: Annotated[int | None, typer.Option(min=1, help="New tokens at most; the context.")] = None,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request at most; more get 413.")] = 1 << 20,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take, waiting included.")] = 600.0,
    step_seconds: Annotated[
        float, typer.Option(help="Seconds without a word of the engine, after which it is started again.")
    ] = 120.0,
    drain_seconds: Annotated[
        float, typer.Option(help="Seconds to finish what runs after SIGTERM or Ctrl-C.")
    ] = 30.0,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log, too.")] = False,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Serve by several replicas, each with all of the above, behind Ray's proxy."),
    ] = False,
    replicas: Annotated[
        str | None, typer.Option(help="With --ray: how many, such as 2; or 1-4, more of them the longer they wait.")
    ] = None,
    fast: FastOption = None,
    device: Device = "auto",
    dtype: DecodeDtype = None,
) -> None:
    """Serve a model over HTTP as OpenAI does; `budget` or `trajectory` in a request say how deep to go.

    Examples: loopformer serve

    loopformer serve runs/mine --rows 64 --queue 256 --degrade

    loopformer serve runs/mine --ray --replicas 2
    """
    from loopformer.errors import LoopformerError, require

    require(ray or replicas is None, "--replicas is for several servers behind one address; add --ray.")
    try:
        from loopformer.serving.replicas import ReplicaCount, run_replicas
        from loopformer.serving.server import ServerSettings, run_server
        from loopformer.serving.service import ServiceSettings
        from loopformer.serving.worker import WorkerSettings
    except ModuleNotFoundError as error:
        raise LoopformerError(
            f"Serving needs {error.name}, which is not installed; pip install 'loopformer[serve]'"
        ) from error

    worker = WorkerSettings(
        the_model(model, model_option), rows, memory, device, dtype, "auto" if fast is None else fast, step_seconds
    )
    settings = ServerSettings(
        worker,
        host,
        port,
        queue,
        degrade,
        api_keys,
        tuple(cors or ()),
        max_prompt,
        max_output,
        max_body,
        drain_seconds,
        ServiceSettings(timeout, log_prompts),
    )
    if ray:
        run_replicas(settings, ReplicaCount.parse(replicas or "1"), typer.echo)
    else:
        run_server(settings, typer.echo)
