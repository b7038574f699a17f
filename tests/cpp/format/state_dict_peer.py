"""The Python side of state_dict_test.cpp: plain torch.optim against the files of one folder.

For each case, in folder/<case>/:
  ours_state.pt, ours_params.pt    come from C++ after STEPS steps; checked against Python's own
                                   history, then gone on from into ours_result.pt
  theirs_state.pt, theirs_params.pt, theirs_result.pt    the same the other way round
folder/bad/ gets files that torch.save made and that are no optimizer's state dict.
"""

import sys
from collections import OrderedDict
from pathlib import Path

import torch

STEPS = 3
SHAPES = [
    (3, 4),
    (5,),
    (),
    (4, 3),
    (2,),
]  # number 3 is transposed, number 4 gets no gradient
MATRICES = [(3, 4), (5, 2), (4, 4), (4, 3), (2, 2)]  # for Muon
GROUPS = [[0, 1], [2, 3, 4]]
ADAM = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
CASES = {
    "adam": ("Adam", ADAM),
    "adam_amsgrad": ("Adam", dict(ADAM, amsgrad=True)),
    "adamw": ("AdamW", ADAM),
    "adamw_amsgrad": ("AdamW", dict(ADAM, amsgrad=True)),
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd_momentum": (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
    ),
    "sgd_nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (
        "Adagrad",
        {
            "lr": 0.1,
            "lr_decay": 0.1,
            "weight_decay": 0.1,
            "initial_accumulator_value": 0.1,
        },
    ),
    "rmsprop": ("RMSprop", {"lr": 0.01, "alpha": 0.9}),
    "rmsprop_centered": (
        "RMSprop",
        {
            "lr": 0.01,
            "alpha": 0.9,
            "eps": 1e-6,
            "weight_decay": 0.1,
            "momentum": 0.9,
            "centered": True,
        },
    ),
}
if hasattr(torch.optim, "Muon"):
    CASES["muon"] = ("Muon", {"lr": 0.02, "momentum": 0.9})
    CASES["muon_rms"] = (
        "Muon",
        {"lr": 0.02, "nesterov": False, "ns_steps": 4, "adjust_lr_fn": "match_rms_adamw"},
    )
# Only Python can write these; C++ continues from them.
PYTHON_ONLY = {
    "adamw_fused": ("AdamW", dict(ADAM, fused=True)),
    "adamw_tensor_lr": ("AdamW", dict(ADAM, lr=torch.tensor(0.0078125), foreach=False)),
}


def pattern(shape, factor, shift):
    numel = torch.Size(shape).numel()
    return (((torch.arange(numel) * factor + shift) % 11) - 5.5).div(16).reshape(shape)


def make_params(cls):
    shapes = MATRICES if cls == "Muon" else SHAPES
    params = [pattern(shape, 3, i) for i, shape in enumerate(shapes)]
    params[3] = params[3].t()
    return [torch.nn.Parameter(p) for p in params]


def make_optimizer(cls, params, options):
    groups = [{"params": [params[i] for i in group]} for group in GROUPS]
    groups[1]["lr"] = options["lr"] / 2
    return getattr(torch.optim, cls)(groups, **options)


def train(optimizer, params, first):
    for step in range(first, first + STEPS):
        for i, p in enumerate(params[:4]):
            # In the parameter's layout, as autograd makes it: fused optimizers take no other.
            p.grad = torch.empty_like(p).copy_(pattern(p.shape, step + 3, 5 * i))
        optimizer.step()


def save_params(params, path):
    state = {i: {"param": p.detach()} for i, p in enumerate(params)}
    torch.save({"state": state, "param_groups": [{"params": list(range(len(params)))}]}, path)


def load_params(path):
    state = torch.load(path, weights_only=True)["state"]
    return [torch.nn.Parameter(values["param"]) for _, values in sorted(state.items())]


def check_value(got, want, where):
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{where}: {type(got)}"
        for name in ("dtype", "shape", "device", "requires_grad"):
            assert getattr(got, name) == getattr(want, name), f"{where}: {name}"
        assert got.stride() == want.stride(), f"{where}: {got.stride()} is not {want.stride()}"
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-7), f"{where}: {got} is not {want}"
        return
    # Python's own defaults have the int 0 where a float is meant.
    same_type = type(got) is type(want) or (type(got), want) == (float, 0)
    assert same_type and got == want, f"{where}: {got!r} is not {want!r}"


def check_dict(got, want):
    assert list(got) == list(want) == ["state", "param_groups"], list(got)
    assert list(got["state"]) == list(want["state"]), f"{list(got['state'])}"
    pairs = [(got["state"][i], want["state"][i], f"state {i}") for i in want["state"]]
    assert len(got["param_groups"]) == len(want["param_groups"])
    pairs += [
        (g, w, "group") for g, w in zip(got["param_groups"], want["param_groups"], strict=True)
    ]
    for got_values, want_values, where in pairs:
        assert list(got_values) == list(want_values), f"{where}: {list(got_values)}"
        for key, value in want_values.items():
            check_value(got_values[key], value, f"{where} {key}")


def go_on_from_ours(folder, cls, options):
    params = make_params(cls)
    optimizer = make_optimizer(cls, params, options)
    train(optimizer, params, 0)
    loaded = torch.load(folder / "ours_state.pt", weights_only=True)
    check_dict(loaded, optimizer.state_dict())

    params = load_params(folder / "ours_params.pt")
    optimizer = make_optimizer(cls, params, {"lr": 123.0})
    optimizer.load_state_dict(loaded)
    train(optimizer, params, STEPS)
    save_params(params, folder / "ours_result.pt")


def write_theirs(folder, cls, options):
    params = make_params(cls)
    optimizer = make_optimizer(cls, params, options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    train(optimizer, params, 0)
    scheduler.step()
    torch.save(optimizer.state_dict(), folder / "theirs_state.pt")
    save_params(params, folder / "theirs_params.pt")
    train(optimizer, params, STEPS)
    save_params(params, folder / "theirs_result.pt")


def write_bad(folder):
    folder.mkdir()
    group = {"lr": 0.1, "params": [0, 1]}
    linear = torch.nn.Linear(2, 2)
    bad = {
        "tensor": torch.ones(3),
        "list": [1, 2],
        "module": linear.state_dict(),
        "no_groups": {"state": {}},
        "no_state": {"param_groups": [group]},
        "state_is_list": {"state": [], "param_groups": [group]},
        "groups_is_dict": {"state": {}, "param_groups": {}},
        "group_is_int": {"state": {}, "param_groups": [1]},
        "no_params": {"state": {}, "param_groups": [{"lr": 0.1}]},
        "params_is_int": {"state": {}, "param_groups": [{"params": 3}]},
        "params_are_names": {"state": {}, "param_groups": [{"params": ["weight"]}]},
        "params_are_bools": {"state": {}, "param_groups": [{"params": [True]}]},
        "param_twice": {"state": {}, "param_groups": [group, group]},
        "state_by_name": {"state": {"weight": {}}, "param_groups": [group]},
        "state_beyond": {"state": {2: {"step": 1}}, "param_groups": [group]},
        "state_below": {"state": {-1: {"step": 1}}, "param_groups": [group]},
        "value_is_dict": {"state": {0: {"step": {}}}, "param_groups": [group]},
        "value_is_object": {
            "state": {0: {"shape": torch.Size([1])}},
            "param_groups": [group],
        },
        "key_is_int": {"state": {0: {3: 3}}, "param_groups": [group]},
        "sparse": {
            "state": {0: {"sum": torch.eye(3).to_sparse()}},
            "param_groups": [group],
        },
        "huge_int": {"state": {0: {"step": 1 << 80}}, "param_groups": [group]},
    }
    for name, value in bad.items():
        torch.save(value, folder / f"{name}.pt")
    good = {"state": {}, "param_groups": [group]}
    torch.save(good, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(good, folder / "protocol_4.pt", pickle_protocol=4)
    torch.jit.script(linear).save(folder / "script.pt")


def write_odd(path):
    """Allowed, though no plain optimizer writes it: gaps, an OrderedDict, shared and odd values."""
    shared = torch.arange(6.0)
    betas = [0.9, 0.99]
    options = {
        "betas": betas,
        "name": "a",
        "none": None,
        "big": 1 << 40,
        "negative": -5,
        "many": 300,
    }
    state = OrderedDict(
        {7: {"a": shared[2:], "b": shared.reshape(2, 3).t(), "half": shared.half()}}
    )
    groups = [dict(options, params=[5, 9]), dict(options, params=[7]), {"params": []}]
    torch.save({"state": state, "param_groups": groups, "extra": [1]}, path)


def main():
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    for name, (cls, options) in CASES.items():
        go_on_from_ours(root / name, cls, options)
    for name, (cls, options) in (CASES | PYTHON_ONLY).items():
        (root / name).mkdir(exist_ok=True)
        write_theirs(root / name, cls, options)
    write_bad(root / "bad")
    write_odd(root / "odd.pt")


if __name__ == "__main__":
    main()
