"""Train a small dropless mixture-of-experts language model on the Python standard library's own source.

    python examples/train_lm.py             # a few minutes on two CPU cores
    python examples/train_lm.py --dense     # the same transformer, dense, with as many active parameters
    python examples/train_lm.py --resume    # go on from the newest checkpoint of an interrupted run
    python examples/train_lm.py --mesh data=2,expert=4    # on eight devices; on CPU these are made up

Ctrl-C finishes the step, saves and exits with status 130; on CPU, `--resume` then ends with exactly the parameters of
a run that was never interrupted. What cannot work is told in one sentence, with status 2.
"""

import dataclasses
import math
import signal
import sys
import zlib
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Float32, Int, Int32, PRNGKeyArray, UInt8
from matplotlib.figure import Figure
from orbax.checkpoint.checkpoint_managers import LatestN
from tqdm import tqdm

import eqx_moe
import lm_mesh
from lm_data import InputError, read_text
from lm_model import LanguageModel, Shape, option

flag = lambda name: "--" + name.replace("_", "-")
Scalar = Float32[Array, ""]
Windows = UInt8[Array, "batch length"]
Load = Int32[Array, "layers experts"]
Axes = tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Settings(Shape):
    """All that decides the result of a run; saved with its checkpoints."""

    context: int = option(128, "bytes the model can look back")
    batch: int = option(16, "windows of text in a step")
    steps: int = option(1500, "training steps, fixed for a run: the learning rate is planned for them")
    learning_rate: float = option(2e-2, "peak of the learning rate")
    seed: int = option(0, "seed of the parameters and of the order of the text")
    save_every: int = option(150, "steps between checkpoints, and between evaluations")

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if not (0 <= value < 2**32 if name == "seed" else type(value) is bool or 0 < value < float("inf")):
                allowed = "in [0, 2**32)" if name == "seed" else "a positive number"
                raise InputError(f"{flag(name)} must be {allowed}, not {value}")
        if self.top_k > self.experts:
            raise InputError(f"--top-k {self.top_k} is above --experts {self.experts}")
        if self.d_model % (2 * self.heads):
            raise InputError(f"--d-model {self.d_model} must be a multiple of twice --heads {self.heads}")

    def optimiser(self) -> Any:  # whose annotations do not know that optax takes Equinox modules
        peak = self.learning_rate
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, self.steps // 10, self.steps, end_value=peak / 20)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))


class State(NamedTuple):
    """What a checkpoint holds; the histories have a row for every step of the run."""

    model: LanguageModel
    optimiser: optax.OptState
    losses: Float32[np.ndarray, " steps"]
    held_out_losses: Float32[np.ndarray, " steps"]
    loads: Int32[np.ndarray, "steps layers experts"]


def initialise(settings: Settings, mesh: lm_mesh.Mesh | None = None) -> State:
    make = lambda key: LanguageModel(settings, parallel=lm_mesh.parallelism(mesh), key=key)
    model = lm_mesh.initialise(make, mesh, jax.random.key(settings.seed))
    losses, held_out_losses = np.full((2, settings.steps), np.nan, np.float32)
    loads = np.zeros((settings.steps, settings.layers, settings.experts), np.int32)
    optimiser = lm_mesh.initialise(settings.optimiser().init, mesh, model)
    return State(model, optimiser, losses, held_out_losses, loads)


def loss_function(model: LanguageModel, text: Windows, axes: Axes) -> tuple[Scalar, tuple[Scalar, Load | None]]:
    """What to minimise; beside it, to report, the cross-entropy in nats per byte and the load of every expert. On a
    mesh the text is one device's, and everything else of all together."""
    logits, stats = model(text[:, :-1])
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:].astype(jnp.int32)).mean()
    entropy = entropy if axes is None else jax.lax.pmean(entropy, axes)
    if stats is None:
        return entropy, (entropy, None)
    # Under vmap, because every layer has to be balanced by itself; otherwise their statistics are added up.
    balance = jax.vmap(lambda stats: eqx_moe.load_balance_loss(stats, axis_name=axes))(stats).mean()
    router_z = jax.vmap(lambda stats: eqx_moe.router_z_loss(stats, axis_name=axes))(stats).mean()
    load = stats.load if axes is None else jax.lax.psum(stats.load, axes)
    return entropy + 0.01 * balance + 0.001 * router_z, (entropy, load)


@jax.jit(static_argnames=("settings", "mesh"), donate_argnames=("model", "optimiser"))
def train_step(
    model: LanguageModel, optimiser: optax.OptState, text: Windows, settings: Settings, mesh: lm_mesh.Mesh | None
) -> tuple[LanguageModel, optax.OptState, Scalar, Load | None]:
    gradients, (loss, load) = jax.grad(lm_mesh.spread(loss_function, mesh), has_aux=True)(model, text)
    # Outside of shard_map, where the norm that is clipped is that of the gradients of all devices.
    updates, optimiser = settings.optimiser().update(gradients, optimiser, model)
    return *lm_mesh.keep_in_place((eqx.apply_updates(model, updates), optimiser), mesh), loss, load


@jax.jit(static_argnames="mesh")
def evaluate(model: LanguageModel, text: UInt8[Array, "groups batch length"], mesh: lm_mesh.Mesh | None) -> Scalar:
    return jax.lax.map(lambda group: lm_mesh.spread(loss_function, mesh)(model, group)[1][0], text).mean()


@jax.jit(static_argnames="mesh")
def generate(
    model: LanguageModel, prompt: UInt8[Array, " context"], key: PRNGKeyArray, mesh: lm_mesh.Mesh | None
) -> UInt8[Array, " length"]:
    def append_to(model, seen, axes):
        def append(seen, key):
            byte = jax.random.categorical(key, model(seen[None])[0][0, -1] / 0.7)
            byte = byte if axes is None else jax.lax.pmax(byte, axes)  # the same on all devices; now JAX knows
            return jnp.append(seen[1:], byte.astype(jnp.uint8)), byte.astype(jnp.uint8)

        seen = seen if axes is None else jax.lax.pcast(seen, axes, to="varying")
        return jax.lax.scan(append, seen, jax.random.split(key, 256))[1]

    return lm_mesh.spread(append_to, mesh, jax.P())(model, prompt)


def read(manager: ocp.CheckpointManager, **items: Any) -> Any:
    """Items of the newest checkpoint."""
    try:
        return manager.restore(manager.latest_step(), args=ocp.args.Composite(**items))
    except Exception as error:  # Orbax has many kinds; for the user they are one.
        raise InputError(f"{manager.directory}/{manager.latest_step()} is damaged: delete it, then resume") from error


def open_checkpoints(folder: Path, made_with: dict[str, Any], *, resume: bool) -> ocp.CheckpointManager:
    # Saving in the background would read arrays while the next step overwrites them.
    keep = {"preservation_policy": LatestN(2), "enable_async_checkpointing": False, "create": not resume}
    manager = ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(**keep))
    if not resume and manager.latest_step() is not None:
        raise InputError(f"{folder} already holds checkpoints: go on with --resume, or choose another --out")
    if resume and manager.latest_step() is None:
        raise InputError(f"{folder} holds no checkpoint to resume from")
    saved = read(manager, settings=ocp.args.JsonRestore())["settings"] if resume else made_with
    other = [f"{flag(name)} {saved.get(name)}, not {now}" for name, now in made_with.items() if saved.get(name) != now]
    if other:
        raise InputError(f"the checkpoints in {folder} were made with {' and '.join(other)}")
    return manager


def draw(folder: Path, state: State, done: int):
    steps = np.arange(1, done + 1)
    axes = (figure := Figure(layout="constrained")).add_subplot(xlabel="step", ylabel="cross-entropy, nats per byte")
    axes.plot(steps, state.losses[:done], linewidth=0.7, label="training")
    axes.plot(steps, state.held_out_losses[:done], "o", label="held out")
    axes.legend()
    figure.savefig(folder / "loss.png")
    columns = np.stack([steps, state.losses[:done], state.held_out_losses[:done]], axis=1)
    np.savetxt(folder / "loss.csv", columns, "%.6g", delimiter=",", header="step,training,held_out", comments="")
    if state.loads.any():
        eqx_moe.plot_load(state.loads[:done], steps=steps).savefig(folder / "expert_load.png")


def print_sample(
    model: LanguageModel, prompt: UInt8[np.ndarray, " context"], settings: Settings, mesh: lm_mesh.Mesh | None
):
    sample = generate(model, prompt, jax.random.key(settings.seed), mesh)
    for name, text in ("prompt", prompt), ("sample", sample):
        print(f"\n--- {name} ---\n{bytes(np.asarray(text)).decode(errors='replace')}")


def spread_windows(
    text: UInt8[np.ndarray, " bytes"], window: Int[np.ndarray, " length"], mesh: lm_mesh.Mesh | None
) -> UInt8[np.ndarray, "groups batch length"]:
    """512 windows over the whole text in groups of 16, or as nearly so as the mesh can divide them."""
    group = math.lcm(16, mesh.size if mesh else 1)
    starts = np.linspace(0, len(text) - len(window), max(512 // group, 1) * group, dtype=int)
    return text[starts.reshape(-1, group, 1) + window]


def run(settings: Settings, *, mesh: lm_mesh.Mesh | None, data: list[Path], out: Path, resume: bool) -> int:
    train, held_out = read_text(data, settings.context)
    made_with = dataclasses.asdict(settings) | {"data": f"of CRC-32 {zlib.crc32(train.tobytes()):08x}"}
    manager = open_checkpoints(out / "checkpoints", made_with, resume=resume)
    state = initialise(settings, mesh)
    if done := manager.latest_step() or 0:
        saved = read(manager, state=ocp.args.StandardRestore(eqx_moe.with_parallel(state, None)))["state"]
        state = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(saved))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.model))
    print(f"{parameters:,} parameters, {len(train):,} bytes of text to train on, {len(held_out):,} held out")
    tokens, window = settings.batch * settings.context, np.arange(settings.context + 1)
    evaluation = lm_mesh.feed(spread_windows(held_out, window, mesh), mesh, axis=1)
    interrupted: list[int] = []

    def finish_step(number: int, _):
        interrupted.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait

    signal.signal(signal.SIGINT, finish_step)
    total, leads, stop = settings.steps * tokens, lm_mesh.leads(), False
    with tqdm(total=total, initial=done * tokens, unit=" tokens", unit_scale=True, disable=not leads) as bar:
        while done < settings.steps and not stop:
            # Text as a function of the step alone: a resumed run sees what it would have seen.
            random = np.random.default_rng((settings.seed, done))
            text = train[random.integers(len(train) - settings.context, size=(settings.batch, 1)) + window]
            text = lm_mesh.feed(text, mesh)
            model, optimiser, *told = train_step(state.model, state.optimiser, text, settings, mesh)
            loss, load = jax.device_get(told)
            if not np.isfinite(loss):
                raise InputError(f"the loss is {loss} at step {done + 1}: lower --learning-rate")
            state, shown = state._replace(model=model, optimiser=optimiser), f"loss {loss:.3f}"
            state.losses[done] = loss
            if load is not None:
                state.loads[done] = load
                shown += f", expert load {load.min() / tokens:.1%} to {load.max() / tokens:.1%} of tokens"
            bar.set_postfix_str(shown, refresh=False)
            bar.update(tokens)
            done += 1
            if due := done % settings.save_every == 0 or done == settings.steps:
                state.held_out_losses[done - 1] = held_out_loss = float(evaluate(model, evaluation, mesh))
                bar.write(f"step {done}: held-out loss {held_out_loss:.4f} nats per byte")
            stop = lm_mesh.anywhere(bool(interrupted))
            if due or stop:
                saved = ocp.args.StandardSave(eqx_moe.with_parallel(state, None))
                manager.save(done, args=ocp.args.Composite(settings=ocp.args.JsonSave(made_with), state=saved))
    if leads:
        draw(out, state, done)
    if done < settings.steps:
        print(f"stopped after step {done}; --resume goes on from the checkpoint in {out.absolute()}")
        return 130
    print_sample(state.model, held_out[: settings.context], settings, mesh)
    print(f"\nheld-out loss {state.held_out_losses[-1]:.4f} nats per byte; plots and checkpoints in {out.absolute()}")
    return 0


def main() -> int:
    # Without the usage an error is one line.
    parser = ArgumentParser(usage=SUPPRESS, description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Settings):
        kind: dict[str, Any] = {"action": "store_true"} if field.type is bool else {"type": field.type}
        parser.add_argument(flag(field.name), default=field.default, help=field.metadata["help"], **kind)
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="files or folders (default: standard library)")
    parser.add_argument("--out", type=Path, help="folder for what is written (default: runs/moe or runs/dense)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--mesh", help="sizes of mesh axes: data=2,expert=4 (default: one device)")
    given = vars(parser.parse_args())
    data, out, resume, mesh = (given.pop(name) for name in ("data", "out", "resume", "mesh"))
    try:
        settings = Settings(**given)
        out = out or Path("runs", "dense" if settings.dense else "moe")
        return run(settings, mesh=lm_mesh.make_mesh(mesh, settings, settings.batch), data=data, out=out, resume=resume)
    except (InputError, OSError) as error:
        parser.error(str(error))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if "Unable to allocate" not in str(error) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        parser.error("not enough memory: choose a smaller model, or lower --batch or --context")
    except KeyboardInterrupt:
        parser.exit(130, "interrupted; what was saved before is whole\n")


if __name__ == "__main__":
    sys.exit(main())
