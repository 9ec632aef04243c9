"""`loopformer serve`: a model behind OpenAI's API, where each request chooses its compute."""

from pathlib import Path
from typing import Annotated

import typer

from loopformer.cli.options import DecodeDtype, Device, FastOption, ModelArgument, ModelOption, the_model
from loopformer.cli.output import stoppable
from loopformer.errors import LoopformerError, require


@stoppable("the server has ended, the same command starts it again")
def serve(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 chooses a free one.")] = 8000,
    rows: Annotated[int, typer.Option(min=1, help="Maximum texts that are generated at once.")] = 16,
    queue: Annotated[int, typer.Option(min=1, help="Maximum queued texts; beyond this, HTTP 429.")] = 64,
    memory: Annotated[
        int | None, typer.Option(min=1, help="Size of the KV cache in bytes. Default: enough for all rows.")
    ] = None,
    degrade: Annotated[
        bool, typer.Option("--degrade", help="Grant smaller budgets as the queue fills, but at least min_budget.")
    ] = False,
    api_keys: Annotated[
        Path | None, typer.Option(help="A file of API keys, one per line; clients must send one of them.")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="An origin whose web pages may use the server; repeatable.")
    ] = None,
    max_prompt: Annotated[int | None, typer.Option(min=1, help="Most prompt tokens. Default: the context.")] = None,
    max_output: Annotated[int | None, typer.Option(min=1, help="Most new tokens. Default: the context.")] = None,
    max_body: Annotated[int, typer.Option(min=1, help="Maximum bytes of a body; beyond this, HTTP 413.")] = 1 << 20,
    timeout: Annotated[float, typer.Option(help="Maximum seconds per request, including queueing.")] = 600.0,
    step_seconds: Annotated[float, typer.Option(help="Restart the engine after this many silent seconds.")] = 120.0,
    drain_seconds: Annotated[
        float, typer.Option(help="Maximum seconds to finish requests after SIGTERM or Ctrl-C.")
    ] = 30.0,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Include prompts in the log.")] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run replicas, each with the options above, behind Ray's proxy.")
    ] = False,
    replicas: Annotated[str | None, typer.Option(help="With --ray: a number, or 1-4 to scale with load.")] = None,
    fast: FastOption = None,
    device: Device = "auto",
    dtype: DecodeDtype = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API; each request chooses its `budget` or `trajectory`.

    Examples: loopformer serve

    loopformer serve runs/mine --rows 64 --queue 256 --degrade

    loopformer serve runs/mine --ray --replicas 2
    """

    require(ray or replicas is None, "--replicas is for several servers behind one address; add --ray.")
    try:
        from loopformer.serving.messages import WorkerSettings
        from loopformer.serving.replicas import ReplicaCount, run_replicas
        from loopformer.serving.server import ServerSettings, run_server
    except ModuleNotFoundError as error:
        raise LoopformerError(
            f"Serving needs {error.name}, which is not installed; pip install 'loopformer[serve]'"
        ) from error

    worker = WorkerSettings(
        the_model(model, model_option), rows, memory, device, dtype, "auto" if fast is None else fast, step_seconds
    )
    settings = ServerSettings(
        worker,
        host=host,
        port=port,
        queue=queue,
        degrade=degrade,
        api_keys=api_keys,
        cors=tuple(cors or ()),
        max_prompt=max_prompt,
        max_output=max_output,
        max_body=max_body,
        drain_seconds=drain_seconds,
        timeout=timeout,
        log_prompts=log_prompts,
    )
    if ray:
        run_replicas(settings, ReplicaCount.parse(replicas or "1"), typer.echo)
    else:
        run_server(settings, typer.echo)
