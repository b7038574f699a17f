"""One rank of a trainer. torchrun starts it: trainers.py TRAINER FOLDER [bf16].

For each of KINDS, trains, saves after half of the steps, and resumes from there. Writes the
parameters of both runs, by kind, as FOLDER/<rank>.pt.
"""

import sys
from pathlib import Path

import shardstep
import torch
import torch.distributed as dist
from common import (
    ACCUMULATE,
    ADAMW,
    BATCH,
    CLIP,
    HALF,
    KINDS,
    RATE,
    STEPS,
    Examples,
    loss_of,
    make_model,
    make_optimizer,
)
from torch import nn
from torch.utils.data import DataLoader


def accelerate(kind: str, folder: Path, bf16: bool) -> dict:
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from shardstep.integrations.accelerate import shard_with

    def run(resume: bool) -> dict:
        set_seed(0)
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=ACCUMULATE,
            mixed_precision="bf16" if bf16 else "no",
        )
        if kind != "plain":
            shard_with(accelerator)
        model = make_model()
        optimizer = make_optimizer(kind, model.parameters())
        loader = DataLoader(Examples(), batch_size=BATCH)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        assert isinstance(model, nn.parallel.DistributedDataParallel) == (kind != "stage2")
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        accelerator.register_for_checkpointing(schedule)
        if resume:
            accelerator.load_state(folder / kind)
        for number, batch in enumerate(loader):
            if resume and number < HALF * ACCUMULATE:
                continue
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
            if not resume and number == HALF * ACCUMULATE - 1:
                accelerator.save_state(folder / kind)
        return accelerator.unwrap_model(model).state_dict()

    return {"whole": run(False), "resumed": run(True)}


def transformers(kind: str, folder: Path, bf16: bool) -> dict:
    from shardstep.integrations.transformers import ShardstepCallback
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    tokens = torch.randint(64, (64, 12), generator=torch.Generator().manual_seed(0))
    examples = [{"input_ids": row, "labels": row} for row in tokens]
    options = {
        "plain": (torch.optim.AdamW, ADAMW),
        "stage1": (
            shardstep.ZeroRedundancyOptimizer,
            {"optimizer_class": torch.optim.AdamW, **ADAMW},
        ),
        "stage2": (
            shardstep.ZeroRedundancyOptimizer,
            {"optimizer_class": torch.optim.AdamW, "stage": 2, "sharding": "element", **ADAMW},
        ),
    }

    def run(resume: bool) -> dict:
        arguments = TrainingArguments(
            output_dir=str(folder / kind),
            max_steps=STEPS,
            save_steps=HALF,
            save_total_limit=None,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATE,
            max_grad_norm=CLIP,
            learning_rate=RATE,
            lr_scheduler_type="linear",
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=bf16,
            seed=0,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=examples,
            optimizer_cls_and_kwargs=options[kind],
        )
        if kind != "plain":
            trainer.add_callback(ShardstepCallback(trainer))
        trainer.train(
            resume_from_checkpoint=str(folder / kind / f"checkpoint-{HALF}") if resume else None
        )
        wrapped = isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
        assert wrapped == (kind != "stage2")
        state = trainer.model.state_dict()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return {**state, "losses": torch.tensor(losses[-HALF:])}

    return {"whole": run(False), "resumed": run(True)}


def lightning(kind: str, folder: Path, bf16: bool) -> dict:
    import shardstep.integrations.lightning  # noqa: F401  (registers the strategy)
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch, _):
            return loss_of(self.model, batch)

        def configure_optimizers(self):
            optimizer = make_optimizer(kind, self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def run(steps: int, checkpoint=None) -> tuple[Trainer, dict]:
        module = Module()
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="shardstep" if kind == "stage2" else "ddp",
            max_steps=steps,
            accumulate_grad_batches=ACCUMULATE,
            gradient_clip_val=CLIP,
            precision="bf16-mixed" if bf16 else "32-true",
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            default_root_dir=folder,
        )
        trainer.fit(module, DataLoader(Examples(), batch_size=BATCH), ckpt_path=checkpoint)
        return trainer, module.state_dict()

    _, whole = run(STEPS)
    trainer, _ = run(HALF)
    trainer.save_checkpoint(folder / f"{kind}.ckpt")
    _, resumed = run(STEPS, folder / f"{kind}.ckpt")
    return {"whole": whole, "resumed": resumed}


def fabric(kind: str, folder: Path, bf16: bool) -> dict:
    from lightning.fabric import Fabric
    from shardstep.integrations.lightning import FabricStrategy

    fabric = Fabric(
        accelerator="cpu",
        devices=2,
        strategy=FabricStrategy() if kind == "stage2" else "ddp",
        precision="bf16-mixed" if bf16 else "32-true",
    )
    fabric.launch()

    def run(resume: bool) -> dict:
        module = fabric.setup_module(make_model())
        optimizer = fabric.setup_optimizers(make_optimizer(kind, module.parameters()))
        loader = fabric.setup_dataloaders(DataLoader(Examples(), batch_size=BATCH))
        state = {"model": module, "optimizer": optimizer}
        if resume:
            fabric.load(folder / f"{kind}.ckpt", state)
        for number, batch in enumerate(loader):
            if resume and number < HALF * ACCUMULATE:
                continue
            last = number % ACCUMULATE == ACCUMULATE - 1
            with fabric.no_backward_sync(module, enabled=not last):
                fabric.backward(loss_of(module, batch))
            if last:
                fabric.clip_gradients(module, optimizer, max_norm=CLIP)
                optimizer.step()
                optimizer.zero_grad()
            if not resume and number == HALF * ACCUMULATE - 1:
                fabric.save(folder / f"{kind}.ckpt", state)
        return module.state_dict()

    return {"whole": run(False), "resumed": run(True)}


def main() -> None:
    trainer, folder, *options = sys.argv[1:]
    torch.set_num_threads(1)
    run = globals()[trainer]
    results = {kind: run(kind, Path(folder), "bf16" in options) for kind in KINDS}
    torch.save(results, Path(folder) / f"{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
