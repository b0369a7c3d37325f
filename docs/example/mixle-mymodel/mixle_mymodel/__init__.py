"""What a Block is on the tp axis."""

from mixle_core import Boundary, ModelLayout, ModuleLayout, Replica, Shard, Term, hookimpl

WHOLE, SHARED = Replica("complete"), Replica("partial")


@hookimpl
def declare_layout(model):
    from mixle_mymodel.model import Block

    if not isinstance(model, Block):
        return None
    entering, leaving = Boundary(outside=WHOLE, inside=SHARED), Boundary(outside=WHOLE, inside=Term())
    modules = {
        "norm": ModuleLayout(parameters={"*": WHOLE}),
        "up": ModuleLayout(parameters={"*": Shard(0)}, inputs={0: entering}),
        "down": ModuleLayout(parameters={"weight": Shard(1), "bias": SHARED}, output=leaving, once=["bias"]),
    }
    return ModelLayout(axis="tp", modules=modules)
