"""Evaluation with lm-evaluation-harness, of engines and of exported models.

```python
results = lm_eval.simple_evaluate(model=harness_model("runs/sft/model"), tasks=["lambada_openai"])
```
"""

from ms_align.evaluation.build import harness_model
from ms_align.evaluation.scorer import ExportedModel, Scorer

__all__ = ["ExportedModel", "Scorer", "harness_model"]
