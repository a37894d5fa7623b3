"""Send a training's events to TensorBoard, Weights & Biases or MLflow without blocking it.

A `Tracker` can be passed to the `on_event=` of every trainer, with its destinations as arguments:

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
