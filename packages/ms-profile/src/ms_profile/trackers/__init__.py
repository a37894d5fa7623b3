"""Shows a training's events live in TensorBoard, Weights & Biases or MLflow, without waiting.

A `Tracker` fits every trainer's `on_event=`; where its events go is a value:

```python
with Tracker(TensorBoard("tensorboard")) as tracker:
    DistributedTrainer("llama", on_event=tracker).train("corpus", steps=100)
```
"""

from ms_profile.trackers.destination import Destination, OpenRun, Point, RunStart
from ms_profile.trackers.mlflow import MLflow
from ms_profile.trackers.tensorboard import TensorBoard
from ms_profile.trackers.tracker import Tracker
from ms_profile.trackers.wandb import Wandb

__all__ = [
    "Destination",
    "MLflow",
    "OpenRun",
    "Point",
    "RunStart",
    "TensorBoard",
    "Tracker",
    "Wandb",
]
