"""python model.py eval: a model's scores on tasks of lm-evaluation-harness, without an export.

The harness's class for models of transformers makes the requests and cuts the answers; our model
computes them. So the scores are those of `lm_eval --model hf` with an export.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn.utils.rnn import pad_sequence

from model import generate
from steady.options import ConfigError


def evaluate(writer, options):
    """Print the scores. writer: generate.Writer; options: generate.EvalOptions."""
    tasks = []
    for name in ",".join(options.tasks).split(","):
        tasks += sorted(map(str, Path(name).glob("*.yaml"))) or [name]  # of a folder
    if tasks == [""]:
        raise ConfigError("--tasks: expected names or files of tasks, such as --tasks hellaswag")
    try:
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table

        model = harness_model(writer, options.batch_size)
    except ImportError as e:
        raise ConfigError(f"eval: {e}; pip install 'lm_eval[hf]'") from None
    folders = [str(Path(task).parent) for task in tasks if Path(task).is_file()]
    # to look through all of the harness's own tasks takes seconds
    manager = TaskManager(include_path=folders, include_defaults=len(folders) < len(tasks))
    try:
        results = simple_evaluate(model, tasks=tasks, task_manager=manager, limit=options.limit,
                                  num_fewshot=options.num_fewshot, log_samples=False)
    except (OSError, KeyError) as e:  # no such task or data, no network
        raise ConfigError(f"--tasks {' '.join(tasks)}: {' '.join(str(e).split())}") from e
    print(json.dumps(results["results"]) if options.json else make_table(results))


def harness_model(writer, batch_size: int):
    """The model of a generate.Writer as an LM of the harness. Raises ImportError."""
    from lm_eval.models.huggingface import HFLM

    class Ours(HFLM):
        def _model_call(self, tokens, **_):
            with torch.no_grad():
                return writer.model(tokens)

        def _model_generate(self, context, max_length, stop, attention_mask, do_sample=False,
                            temperature=1.0, top_k=50, top_p=1.0, **_):
            """context [B, T], padded on the left → [B, ≤ max_length]: each row is continued alone,
            until any text of `stop`.
            """
            rows = []
            for ids, mask in zip(context, attention_mask.bool(), strict=True):
                new = []

                def add(token, new=new):
                    new.append(int(token[0]))
                    text = writer.tokenizer.decode(new)
                    return any(end in text for end in stop)

                generate(writer.model, ids[mask][None], max_length - len(ids),
                         temperature if do_sample else 0.0, top_k, top_p, writer.stop, add)
                rows.append(torch.tensor(new, device=ids.device))
            return torch.cat((context, pad_sequence(rows, True, self.tokenizer.pad_token_id)), 1)

    stand_in = SimpleNamespace(device=writer.device, config=None)
    return Ours(stand_in, tokenizer=writer.tokenizer, backend="causal", batch_size=batch_size,
                max_length=writer.context)
