"""Both text encoders, trained alone first so that what they give carries every attribute of a caption."""
import time

import torch
import torch.nn.functional as F

import parts
import scenes
from training.captions import LABEL_SIZES, caption_data, draw_captions
from training.work import SIZES, autocast, rate, save, say


class ReadOuts(torch.nn.Module):
    """Linear heads that read the scene from both encoders, so that what they give carries every attribute.

    From CLIP's pooled output and T5's end mark: all eight labels. From T5 at each shape word: that object's
    colour, shape and size and its side (the relation, seen from that object).
    """

    def __init__(self, t5_tokenizer):
        super().__init__()
        self.pooled = torch.nn.Linear(96, sum(LABEL_SIZES))
        self.end = torch.nn.Linear(128, sum(LABEL_SIZES))
        self.word = torch.nn.Linear(128, 11 + 7 + 4 + 5)
        is_shape = torch.zeros(len(t5_tokenizer), dtype=torch.bool)
        for word in {w for words in scenes.SHAPE_WORDS.values() for w in words}:
            ids = t5_tokenizer(word, add_special_tokens=False).input_ids
            assert len(ids) == 1, word
            is_shape[ids[0]] = True
        self.register_buffer("is_shape", is_shape)

    def forward(self, pooled, text, t5_ids, labels):
        rows = torch.arange(len(text), device=text.device)
        end = (t5_ids == 1).int().argmax(1)
        targets = labels.unbind(1)
        losses, right = [], []

        def read(logits, sizes, wanted):
            for part, target in zip(logits.float().split(sizes, 1), wanted):
                losses.append(F.cross_entropy(part, target))
                right.append(((part.argmax(1) == target) | (target == -100)).float().mean())

        read(self.pooled(pooled), LABEL_SIZES, targets)
        read(self.end(text[rows, end]), LABEL_SIZES, targets)
        shapes = self.is_shape[t5_ids].int()
        first, last = shapes.argmax(1), shapes.shape[1] - 1 - shapes.flip(1).argmax(1)
        relation = targets[6]
        opposite = torch.where(relation >= 0, torch.where(relation < 4, relation ^ 1, relation), relation)
        read(self.word(text[rows, first]), [11, 7, 4, 5], [*targets[0:3], relation])
        two = last != first
        masked = [torch.where(two, t, torch.full_like(t, -100)) for t in (*targets[3:6], opposite)]
        read(self.word(text[rows, last]), [11, 7, 4, 5], masked)
        return torch.stack(losses).mean(), torch.stack(right).min()


def stage_text(a):
    began = time.time()
    data = caption_data(a)[SIZES[0]]
    p = {k: v.to(a.device) for k, v in parts.build().items() if k.startswith("text")}
    heads = ReadOuts(parts.tokenizers()[1]).to(a.device)
    parameters = [*p["text_encoder"].parameters(), *p["text_encoder_2"].parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    step = 0
    while (progress := (time.time() - began) / a.text_time) < 1:
        rows = torch.randint(len(data["table"]), (a.text_batch,), device=a.device)
        clip_ids, t5_ids, labels = draw_captions(data, rows)
        with autocast(a):
            pooled = p["text_encoder"](input_ids=clip_ids).pooler_output
            text = p["text_encoder_2"](input_ids=t5_ids).last_hidden_state
            loss, right = heads(pooled, text, t5_ids, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * rate(progress, 0.5, 0.05)
        optimizer.step()
        step += 1
        if step % 100 == 0 or a.device == "cpu":
            say("text", step, round(loss.item(), 4), "least read-out right", round(right.item(), 4))
    record = dict(steps=step, seconds=round(time.time() - began, 1), loss=round(loss.item(), 5), least_right=round(right.item(), 4))
    save(a, "text.pt", dict(clip=p["text_encoder"].state_dict(), t5=p["text_encoder_2"].state_dict(), heads=heads.state_dict(), record=record))
