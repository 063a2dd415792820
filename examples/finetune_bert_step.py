"""Fine-tune BERT on a GLUE task with STEP, in transformers' Trainer: dense Adam first, then 2:4 masks under its frozen variance.

    python examples/finetune_bert_step.py --toy                              # seconds, on a CPU
    python examples/finetune_bert_step.py --task sst2 --bert bert-base-uncased --data glue

The toy is a BERT of one layer that learns to tell questions from statements in Shakespeare, which ships with the package. A GLUE
task is read from the folder --data (see nmsparse.workbench.tasks), and --bert is a pretrained BERT: a folder, or a name on the
Hub. Needs pip install "nmsparse[workbench]".
"""

import argparse

import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import nmsparse as nm
from nmsparse.integrations.transformers import SparsityCallback, save_packed, step_optimizer
from nmsparse.workbench.tasks import load_task


def tiny_bert(vocabulary: int, length: int) -> BertForSequenceClassification:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=vocabulary, max_position_embeddings=length, **sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="a tiny BERT for a few steps, without downloads")
    parser.add_argument("--task", default="sst2", help="a GLUE task of one or two sentences")
    parser.add_argument("--data", help="folder with the GLUE tasks and BERT's vocabulary")
    parser.add_argument("--bert", default="bert-base-uncased", help="the pretrained model")
    parser.add_argument("--output", default="bert-step", help="folder for checkpoints and the finished model")
    given = parser.parse_args()

    torch.manual_seed(0)
    task = load_task("questions", length=16) if given.toy else load_task(given.task, given.data)
    model = (
        tiny_bert(task.facts.vocabulary, task.facts.length)
        if given.toy
        else AutoModelForSequenceClassification.from_pretrained(given.bert, num_labels=task.facts.classes)
    )
    args = TrainingArguments(
        given.output,
        max_steps=20 if given.toy else -1,
        num_train_epochs=3,
        per_device_train_batch_size=32,
        learning_rate=1e-3 if given.toy else 3e-5,
        warmup_steps=0.06,
        weight_decay=0.01,
        logging_steps=5 if given.toy else 100,
        save_strategy="no" if given.toy else "epoch",
        remove_unused_columns=False,  # the task's batches hold what BERT takes and nothing else
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=given.toy,
    )
    callback = SparsityCallback(nm.STEP("2:4"))  # AutoSwitch finds the end of the dense phase
    trainer = Trainer(
        model,
        args,
        data_collator=lambda batch: batch,  # the task has collated it
        train_dataset=task.train,
        eval_dataset=task.valid,
        compute_metrics=lambda seen: {"accuracy": float((seen.predictions.argmax(-1) == seen.label_ids).mean())},
        optimizer_cls_and_kwargs=step_optimizer(args),
    )
    callback.attach(trainer)  # the model is sparse from here on, and every logger sees density and flip rate
    trainer.train()

    nm.freeze_(model)  # exact zeros; plain transformers modules again
    accuracy = trainer.evaluate()["eval_accuracy"]
    save_packed(model, given.output, pattern="2:4")  # AutoModel reads it after `import nmsparse.integrations.transformers`
    loaded = AutoModelForSequenceClassification.from_pretrained(given.output)
    weight = loaded.get_parameter(f"{callback.run.layers[0]}.weight")
    print(f"dense until update {callback.run.stats()['total']['switched_at']}; validation accuracy {accuracy:.3f}")
    print(f"density {float((weight != 0).float().mean()):.3f}; verified: {nm.verify(given.output).ok}; model in {given.output}")


if __name__ == "__main__":
    main()
