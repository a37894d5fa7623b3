"""The engine of resumable runs over a corpus: batches, workers, a journal and one output folder."""
