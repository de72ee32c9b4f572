"""Where do capitals go? Python's own help texts under transformers.Trainer: steps of 32 texts, 8 times 4 and whole.

    pip install microbatch transformers accelerate
    python examples/trainer_text.py

The model is Hugging Face's, its loss a mean over the letters of a piece. The Trainer sums such means as they are.
"""

import tempfile
from pydoc_data.topics import topics

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments, set_seed

from microbatch.training.integrations.transformers_trainer import ExactTrainer

texts = [text.encode("ascii", "replace")[:256] for topic in topics.values() for text in topic.split("\n\n")[:8] if text]
config = BertConfig(
    vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=2,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def collate(pieces):
    """Small letters in; labels say which were capitals, and leave out what is no letter."""
    small = [torch.tensor(list(text.lower())) for text in pieces]
    labels = [
        torch.tensor([int(chr(c).isupper()) if chr(c).isalpha() else -100 for c in text]) for text in pieces
    ]  # fmt: skip
    return {
        "input_ids": pad_sequence(small, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(text) for text in small], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def train(trainer_class, texts_at_once, **more):
    set_seed(0)
    model = BertForTokenClassification(config).double()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=texts_at_once, gradient_accumulation_steps=32 // texts_at_once,
            max_steps=5, learning_rate=0.1, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, use_cpu=True,
            save_strategy="no", report_to=[], disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        loss = trainer_class(model, args, collate, texts, **more).train().training_loss
    return model, loss


whole, _ = train(Trainer, 32)
for trainer, model, loss in [
    ("Trainer     ", *train(Trainer, 4)),
    ("ExactTrainer", *train(ExactTrainer, 4, micro_batch_size=4)),
]:
    apart = max((a - b).abs().max() for a, b in zip(model.parameters(), whole.parameters()))
    print(f"{trainer} mean loss {loss:.4f} of 5 steps; weights differ from those of whole batches by {apart:.0e}")
