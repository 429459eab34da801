"""A Trainer of transformers that trains adapters of PEFT under FSDP2, and a posterior over them; called by torchrun."""

import sys
import tempfile

import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2ForSequenceClassification, Trainer, TrainingArguments

import laplace_plus as lp

torch.manual_seed(0)
config = GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2, num_labels=2, pad_token_id=0)
options = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
model = get_peft_model(GPT2ForSequenceClassification(config), options)
ids = torch.randint(1, 13, (16, 6))
rows = [{"input_ids": own, "labels": int(own[0] > 6)} for own in ids]
with tempfile.TemporaryDirectory() as folder:
    settings = {"max_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(folder, **settings, report_to="none", disable_tqdm=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    # accelerate shards by itself on accelerators alone; on the CPU it has to be told.
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
    )
    state = trainer.accelerator.state
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    trainer.is_fsdp_enabled = True
    trainer.train()
model, rank, size = trainer.model_wrapped, torch.distributed.get_rank(), torch.distributed.get_world_size()
assert any(type(own).__name__ == "DTensor" for own in model.parameters()), type(model)
mine = [{"input_ids": ids[rank::size], "labels": (ids[rank::size, 0] > 6).long()}]
posterior = lp.distributed.fit(lp.KFAC(model, "classification", parameters="lora"), mine)
with lp.distributed.together(posterior):
    posterior.fit_prior_precision("marginal_likelihood")
    prediction = posterior.predictive({"input_ids": ids[rank : rank + 3]})
sys.stdout.write(f"rank {rank}: {posterior!r}, {tuple(prediction.mean.shape)}\n")
torch.distributed.destroy_process_group()
