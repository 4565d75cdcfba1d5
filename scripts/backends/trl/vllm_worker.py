"""What a vLLM engine without a GPU is given weights by; vLLM's own transfers and TRL's loading need one."""

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


def reload(runner: Any, **source: Any) -> None:
    """Load weights into an engine's model as a checkpoint's are loaded.

    CPUs with AVX-512 compute from packed copies, of which vLLM leaves that of tied embeddings as it was.
    """
    runner.reload_weights(**source)
    for layer in runner.get_model().modules():
        if isinstance(layer, VocabParallelEmbedding):
            layer.quant_method.process_weights_after_loading(layer)


class ReloadingWorker:
    """What a server's workers can do besides, on a call from the trainer."""

    model_runner: Any

    def reload_from(self, folder: str) -> None:
        """Load the weights of a folder."""
        reload(self.model_runner, weights_path=folder)
