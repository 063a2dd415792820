"""Hugging Face transformers: train with ``Trainer``, save and load packed checkpoints.

    callback = SparsityCallback(nm.SRSTE("2:4"))
    trainer = Trainer(model, args, train_dataset=..., callbacks=[callback])     # the model is sparse from here on
    callback.attach(trainer)                                                    # optional: its metrics reach every logger
    trainer.train()
    nm.freeze_(model); model.save_pretrained("out")                             # loads with plain from_pretrained
    save_packed(model, "out", pattern="2:4")                                    # 9/16 of the bytes in 16 bit

Importing this module is enough for ``AutoModel.from_pretrained`` to read what :func:`save_packed` wrote. It unpacks one tensor
at a time from memory-mapped files, and the result is an ordinary dense model with exact zeros. A process that has not imported
it gets a warning from transformers about an unknown quantization type, and random weights where packed ones should be.

**PEFT.** Adapters on a frozen sparse model (``nm.freeze_``, then ``get_peft_model``) train beside the base weights, whose zeros
stay as they are. Merging destroys them: ``merge_and_unload`` adds a dense product of two small matrices to every weight. Serve
base and adapter side by side, or merge with :func:`merge_keeping_zeros`, which drops what the product adds to zeros and is
therefore no longer exactly the model that was trained. Adapters that are on the model when it is converted stay dense.

**Mixture of experts.** The expert weights of transformers 5 are 3-D parameters, which their module multiplies itself. They are
sparse by the names of the parameters (``model.layers.0.mlp.experts.down_proj``), emulated, in whichever of its ways the module
computes. A recipe acts on what the module sees of a weight: gradients stay whole, and a second backward mask is left out, with
the reason in ``run.skipped``; ``sdgp`` and FP8 leave experts dense. ``s-ste`` has one scale for all experts of a parameter.
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError('this needs the package transformers, which is not installed: pip install "nmsparse[hf]".') from error

from nmsparse.integrations.transformers._callback import SparsityCallback
from nmsparse.integrations.transformers._merge import merge_keeping_zeros
from nmsparse.integrations.transformers._optimizer import step_optimizer
from nmsparse.integrations.transformers._quantizer import PackedConfig, PackedQuantizer
from nmsparse.integrations.transformers._save import save_packed

__all__ = ["PackedConfig", "PackedQuantizer", "SparsityCallback", "merge_keeping_zeros", "save_packed", "step_optimizer"]
