"""Evaluation by lm-evaluation-harness: our engines and exported models as models of its own.

```python
results = lm_eval.simple_evaluate(model=harness_model("runs/sft/model"), tasks=["lambada_openai"])
```
"""

from ms_align.evaluation.faces import harness_model
from ms_align.evaluation.scorer import ExportedModel, Scorer

__all__ = ["ExportedModel", "Scorer", "harness_model"]
