"""fedjax: its federated averaging on its jit backend, with channels last, which is jax's default, on all cores."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from work import BATCH, CLASSES, CLIENTS, MAX_NORM, PARAMETERS, RATE, Report, pictures, rounds_wanted

# fedjax 0.0.17 uses names of jax that were removed from jax since.
for _name in ("tree_map", "tree_leaves", "tree_flatten", "tree_unflatten", "tree_structure"):
    setattr(jax, _name, getattr(jax.tree_util, _name))

import fedjax  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

UNITS = (1600, 512, 128, CLASSES)


def first_weights() -> dict[str, jax.Array]:
    keys = iter(jax.random.split(jax.random.PRNGKey(0), 8))
    shapes = {"conv1": (5, 5, 3, 32), "conv2": (5, 5, 32, 64)}
    shapes |= {f"fc{i}": pair for i, pair in enumerate(pairwise(UNITS), start=1)}
    weights = {}
    for name, shape in shapes.items():
        bound = float(np.prod(shape[:-1])) ** -0.5  # torch's first weights
        weights[name] = jax.random.uniform(next(keys), shape, minval=-bound, maxval=bound)
        weights[f"{name}_bias"] = jnp.zeros(shape[-1])
    assert sum(value.size for value in weights.values()) == PARAMETERS
    return weights


def outputs(w: dict[str, jax.Array], x: jax.Array, key: jax.Array | None) -> jax.Array:
    for name in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(x, w[name], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + w[f"{name}_bias"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.reshape(len(x), -1)
    for layer in (1, 2):
        x = jax.nn.relu(x @ w[f"fc{layer}"] + w[f"fc{layer}_bias"])
        if key is not None:
            kept = jax.random.bernoulli(jax.random.fold_in(key, layer), 0.5, x.shape)
            x = jnp.where(kept, 2 * x, 0.0)
    return x @ w["fc3"] + w["fc3_bias"]


def loss_of(w: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(outputs(w, batch["x"], key), batch["y"]).mean()


def main() -> None:
    _, parse = rounds_wanted()
    report = Report("fedjax, 2 cores", ("fedjax", "jax"), parse().rounds)
    clients = [
        fedjax.ClientDataset({"x": np.ascontiguousarray(x.transpose(0, 2, 3, 1)), "y": y.astype(np.int32)})
        for x, y in pictures()
    ]
    sgd = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.sgd(RATE))
    algorithm = fed_avg.federated_averaging(
        jax.jit(jax.grad(loss_of)),
        fedjax.optimizers.create_optimizer_from_optax(sgd),
        fedjax.optimizers.sgd(learning_rate=1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1),
    )
    state, key = algorithm.init(first_weights()), jax.random.PRNGKey(1)

    def one_round() -> None:
        nonlocal state, key
        key, *keys = jax.random.split(key, CLIENTS + 1)
        asked = [(str(i).encode(), client, mine) for i, (client, mine) in enumerate(zip(clients, keys, strict=True))]
        state, _ = algorithm.apply(state, asked)
        jax.block_until_ready(state.params)  # jax returns before it has computed the result

    report.play(one_round)
    report.end(float(loss_of(state.params, clients[0].all_examples(), None)))


if __name__ == "__main__":
    main()
