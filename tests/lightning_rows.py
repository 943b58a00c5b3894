"""The rows of `docs/lightning.md`: what it is, what it means in each layout, and what shows it."""

from collections.abc import Sequence
from dataclasses import dataclass

LAYOUTS = ("dp", "tp", "pp")
SAME, REFUSED = "same", "refused"
EVERYWHERE = (SAME, SAME, SAME)
NOWHERE = (REFUSED, REFUSED, REFUSED)
REPLICATED = (SAME, REFUSED, REFUSED)
NOT_IN_PIPELINES = (SAME, SAME, REFUSED)


@dataclass(frozen=True)
class Row:
    """One line of the page."""

    covers: str
    """Names of the flags, hooks or callbacks, separated by blanks."""
    evidence: str
    """Scenarios, refusals and tests that show it, separated by blanks."""
    verdicts: tuple[str, str, str] = EVERYWHERE
    """Under DP, TP and PP."""
    note: str = ""
    title: str = ""
    """What the page shows in place of the names."""

    @property
    def names(self) -> list[str]:
        """The names, one by one."""
        return self.covers.split()

    @property
    def name(self) -> str:
        """As the page shows it."""
        return self.title or ", ".join(f"`{name}`" for name in self.names)


FLAGS: Sequence[Row] = (
    Row(
        "accelerator",
        "plain_fit test_other_accelerators_are_refused",
        note="CPU and CUDA; others are refused",
    ),
    Row("strategy", "plain_fit", note="this one"),
    Row(
        "devices num_nodes",
        "plain_fit test_ranks_that_do_not_divide_are_refused",
        note="ranks that TP x PP does not divide are refused, with the numbers",
    ),
    Row(
        "precision",
        "double_precision test_low_precision_trains_alike test_precisions_are_refused",
        note=(
            "`32-true`, `64-true`, `bf16-mixed`, `bf16-true`, `16-mixed`; others are refused. With "
            "a plan, "
            "`bf16-mixed` means bfloat16 weights under float32 masters, and steps are autocast "
            "around the network; "
            "`16-mixed` "
            "on the CPU is refused, where Lightning would use bfloat16"
        ),
    ),
    Row("logger", "plain_fit csv_logger defaults", note="rank 0 writes"),
    Row("callbacks", "lambda_callback hook_order"),
    Row("fast_dev_run", "fast_dev_run"),
    Row("max_epochs min_epochs max_steps min_steps max_time", "plain_fit end_of_training"),
    Row(
        "limit_train_batches limit_val_batches limit_test_batches limit_predict_batches",
        "limits",
        note="batches of one data-parallel rank",
    ),
    Row("overfit_batches", "overfit"),
    Row("val_check_interval check_val_every_n_epoch num_sanity_val_steps", "when_to_validate"),
    Row("log_every_n_steps", "plain_fit accumulated"),
    Row("enable_checkpointing", "best_and_last defaults"),
    Row("enable_progress_bar", "bars"),
    Row(
        "enable_model_summary",
        "summary example_input",
        note=(
            "under TP and PP it shows the part of rank 0, and a line says how much of the "
            "model that "
            "is; with `example_input_array` it is refused under PP"
        ),
    ),
    Row(
        "accumulate_grad_batches",
        "accumulate accumulated test_accumulation_and_a_short_last_window",
        note=(
            "a last window that is shorter divides by what it contains, where Lightning alone "
            "divides by the full number"
        ),
    ),
    Row(
        "gradient_clip_val gradient_clip_algorithm",
        "clip_by_norm clip_by_value",
        note="the norm is that of the whole model",
    ),
    Row(
        "deterministic benchmark inference_mode",
        "modes",
        note="with FSDP2 `no_grad` takes the place of `inference_mode`",
    ),
    Row("detect_anomaly", "modes test_an_anomaly_is_detected"),
    Row(
        "use_distributed_sampler",
        "test_without_distributed_sampler test_peers_read_the_same_and_replicas_other_samples",
        note="samples are dealt to data-parallel ranks alone",
    ),
    Row("profiler", "profiled"),
    Row("barebones", "barebones"),
    Row(
        "plugins",
        "test_the_connectors_plugins_are_taken test_other_precisions_are_refused_by_name "
        "test_all_ranks_train",
        title="`plugins`: precision, cluster environments",
        note="precision plugins that `precision` stands for; others are refused",
    ),
    Row(
        "CheckpointIO",
        "checkpoint_plugin",
        NOWHERE,
        title="`plugins`: a `CheckpointIO`",
        note="checkpoints are written by all ranks, in the format of checkpoint.md",
    ),
    Row(
        "LayerSync",
        "layer_sync layer_sync_plugin",
        REPLICATED,
        title="`plugins`: a `LayerSync`",
        note="without a plan",
    ),
    Row(
        "sync_batchnorm",
        "sync_batchnorm test_batch_norms_are_synchronised",
        REPLICATED,
        note="refused on the CPU, where torch has none, and with a plan; its test needs two GPUs",
    ),
    Row("reload_dataloaders_every_n_epochs", "reload"),
    Row("default_root_dir", "defaults"),
    Row("enable_autolog_hparams", "defaults"),
    Row(
        "model_registry",
        "test_other_accelerators_are_refused",
        NOWHERE,
        note="checkpoints are folders",
    ),
)

ENTRY_POINTS: Sequence[Row] = (
    Row("fit", "plain_fit fit_again", note="also again, with the same Trainer and module"),
    Row("validate test", "fit_again limits resume"),
    Row(
        "predict",
        "limits resume prediction_writer",
        note=(
            "all ranks of a model copy get its predictions; data-parallel ranks have their samples'"
        ),
    ),
    Row("return_predictions", "limits"),
    Row("ckpt_path save_checkpoint", "resume", note="a folder, which any layout loads"),
    Row(
        "storage_options weights_only",
        "resume storage_options",
        NOWHERE,
        title="`storage_options`",
        note="refused when saving; `weights_only` has no effect on loading: nothing is unpickled",
    ),
    Row("verbose datamodule", "data_module fit_again"),
)

OPTIMIZATION: Sequence[Row] = (
    Row(
        "training_step",
        "plain_fit skipped_steps",
        note=(
            "called once for each micro-batch; returning None skips it, also on single "
            "ranks, where "
            "Lightning's DDP refuses"
        ),
    ),
    Row("lr_schedulers", "several_schedulers", title="several schedulers, by step and by epoch"),
    Row("ReduceLROnPlateau", "plateau", title="`ReduceLROnPlateau` with `monitor`"),
    Row("estimated_stepping_batches", "one_cycle"),
    Row(
        "automatic_optimization optimizers manual_backward toggle_optimizer untoggle_optimizer "
        "toggled_optimizer",
        "manual_optimization manual_optimization_refused",
        REPLICATED,
        title="manual optimization, several optimizers, `toggle_optimizer`",
        note="a schedule runs forward and backward by itself",
    ),
    Row("clip_gradients", "step_hooks manual_optimization"),
    Row(
        "LBFGS",
        "lbfgs closure_twice",
        NOWHERE,
        title="optimizers that evaluate the closure several times (`LBFGS`)",
        note="refused when the optimizers are there, on every rank",
    ),
    Row(
        "torch.compile",
        "test_compiled_module_is_refused",
        NOWHERE,
        title="`torch.compile` of the whole module",
        note="by Lightning itself; compile the network, or layers, within the module",
    ),
    Row(
        "compiled",
        "compiled_network compiled_in_plan",
        REPLICATED,
        title="a compiled network in a module",
        note="a plan's names do not match those of the compiled network; compile its layers",
    ),
)

LOGGING: Sequence[Row] = (
    Row(
        "log_dict name value prog_bar logger on_step on_epoch batch_size", "log_options accumulated"
    ),
    Row(
        "reduce_fx",
        "log_options reduce_fx",
        note="mean, sum, max, min; others are refused in the step",
    ),
    Row(
        "sync_dist",
        "log_options",
        note=(
            "always on for what a step logs; in other hooks as Lightning's, over "
            "data-parallel ranks"
        ),
    ),
    Row("sync_dist_group", "sync_dist_group_refused", NOWHERE, note="in a step"),
    Row("enable_graph", "enable_graph", NOWHERE, note="in a step"),
    Row("add_dataloader_idx", "log_options several_loaders"),
    Row(
        "rank_zero_only",
        "log_options",
        note=(
            "under PP rank 0 does not get past the network in a step: log without a condition there"
        ),
    ),
    Row(
        "metric_attribute",
        "metric_objects metric_in_pipeline metric_in_step",
        NOT_IN_PIPELINES,
        title="torchmetrics objects, `metric_attribute`",
        note="stages before the last would never update them",
    ),
)

HOOKS: Sequence[Row] = (
    Row("setup teardown configure_model configure_callbacks configure_optimizers", "hook_order"),
    Row(
        "on_fit_start on_fit_end on_train_start on_train_end on_validation_start on_validation_end "
        "on_test_start on_test_end on_predict_start on_predict_end",
        "hook_order",
    ),
    Row("on_sanity_check_start on_sanity_check_end", "hook_order"),
    Row(
        "on_train_epoch_start on_train_epoch_end on_validation_epoch_start "
        "on_validation_epoch_end on_test_epoch_start on_test_epoch_end on_predict_epoch_start "
        "on_predict_epoch_end",
        "hook_order",
    ),
    Row(
        "on_train_batch_start on_train_batch_end on_validation_batch_start "
        "on_validation_batch_end on_test_batch_start on_test_batch_end on_predict_batch_start "
        "on_predict_batch_end",
        "hook_order hook_values",
    ),
    Row(
        "on_validation_model_eval on_validation_model_train on_test_model_eval "
        "on_test_model_train on_predict_model_eval on_validation_model_zero_grad",
        "hook_order",
    ),
    Row(
        "on_before_zero_grad optimizer_zero_grad",
        "hook_order step_hooks kept_gradients",
        note="gradients that are put there by hand are refused: windows are zeroed by the strategy",
    ),
    Row("on_before_backward on_after_backward", "hook_order hook_values"),
    Row(
        "on_before_optimizer_step",
        "step_hooks",
        note="`p.grad` is the reduced gradient of the window; what is done to it counts",
    ),
    Row("configure_gradient_clipping optimizer_step lr_scheduler_step", "step_hooks plateau"),
    Row(
        "backward",
        "backward_hook",
        NOWHERE,
        note="automatic optimization; under manual optimization as `manual_backward`",
    ),
    Row(
        "validation_step test_step predict_step forward",
        "limits several_loaders",
        note="under PP a step calls the network once",
    ),
    Row(
        "on_save_checkpoint",
        "edited_checkpoint hook_order",
        note="the state dict holds this rank's part; what is changed in it is what is saved",
    ),
    Row(
        "on_load_checkpoint",
        "edited_checkpoint hook_order changed_when_loaded",
        note="weights are in place already, so changing the state dict is refused",
    ),
    Row("strict_loading", "edited_checkpoint"),
    Row("state_dict load_state_dict", "hook_order"),
    Row(
        "on_exception",
        "test_all_ranks_fail_alike test_a_rank_that_fails_alone_saves_nothing",
        note="on the rank that failed; no checkpoint can be saved there then, which is said",
    ),
    Row(
        "all_gather",
        "gathering gather_in_step",
        note="in hooks; in a step under PP it is refused, since other stages do not get there",
    ),
    Row("print", "gathering"),
    Row("save_hyperparameters", "csv_logger defaults"),
    Row(
        "example_input_array",
        "example_input summary",
        NOT_IN_PIPELINES,
        note="with a summary or a logger that calls the network",
    ),
    Row("freeze unfreeze", "frozen", note="before the fit; during it see `BaseFinetuning`"),
)

DATA: Sequence[Row] = (
    Row(
        "prepare_data train_dataloader val_dataloader test_dataloader predict_dataloader",
        "data_module reload",
    ),
    Row(
        "on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer",
        "data_module",
    ),
    Row(
        "shuffled",
        "test_peers_read_the_same_and_replicas_other_samples test_one_replica_reads_as_one_process",
        title="a plain DataLoader",
        note=(
            "with several data-parallel ranks Lightning deals the samples out, in training always "
            "shuffled, and says so; ranks of one model copy read the same; with one data-parallel "
            "rank the order is the loader's own"
        ),
    ),
    Row(
        "own_sampler",
        "test_peers_read_the_same_and_replicas_other_samples test_one_replica_reads_as_one_process",
        title="the user's own sampler or batch sampler",
        note="drawn once and shared; that it is dealt out is announced",
    ),
    Row(
        "IterableDataset",
        "stream test_different_batches_within_a_copy_are_an_error"
        " test_a_later_batch_is_compared_with_the_one_after_it",
        title="iterable data sets, random changes of samples",
        note=(
            "left alone, as by Lightning; when the ranks of a model copy get different "
            "batches, that is an error where it is looked for: in the first 4 batches of a pass, "
            "and in every 64th by the step after it"
        ),
    ),
    Row(
        "mappings",
        "mappings",
        title="batches that are mappings, with unknown fields",
        note="under PP `batch_dims` or `split_micro_batch` says how they are cut",
    ),
    Row("several", "several_loaders", title="several training or evaluation loaders"),
)

CALLBACKS: Sequence[Row] = (
    Row("Callback LambdaCallback", "hook_order lambda_callback"),
    Row(
        "ModelCheckpoint Checkpoint",
        "best_and_last when_to_save resume",
        note="`monitor`, top-k with ties and NaN, last, by steps, epochs or time, weights only",
    ),
    Row("EarlyStopping", "best_and_last not_finite end_of_training"),
    Row("GradientAccumulationScheduler", "accumulation_scheduler"),
    Row("LearningRateMonitor DeviceStatsMonitor Timer", "monitors end_of_training"),
    Row("ProgressBar TQDMProgressBar RichProgressBar", "bars"),
    Row(
        "ModelSummary RichModelSummary",
        "summary",
        note="under TP and PP of the part of rank 0, which is said",
    ),
    Row("LearningRateFinder", "lr_finder tuner", note="also `Tuner.lr_find`"),
    Row("BasePredictionWriter", "prediction_writer", note="all ranks of a model copy are called"),
    Row(
        "OnExceptionCheckpoint",
        "test_all_ranks_fail_alike test_a_rank_that_fails_alone_saves_nothing",
        note="when all ranks stop together; what one rank alone can't save is said",
    ),
    Row("SpikeDetection", "test_a_spike_ends_training_on_every_rank"),
    Row(
        "BaseFinetuning BackboneFinetuning",
        "finetuning backbone_finetuning finetuning_refused own_finetuning",
        NOT_IN_PIPELINES,
        note="freeze in the constructor or in `configure_model` there, and with a sharded optimizer"
        " or masters, where it is refused too",
    ),
    Row(
        "WeightAveraging EMAWeightAveraging",
        "averages averages_saved weight_averaging ema averaging_of_a_late_network",
        REPLICATED,
        note="without a plan: the copy is made before a network is cut or built",
    ),
    Row("StochasticWeightAveraging", "swa swa_refused", REPLICATED, note="without a plan"),
    Row("ModelPruning", "pruning pruning_refused", REPLICATED, note="without a plan"),
    Row(
        "ThroughputMonitor",
        "throughput throughput_refused",
        REPLICATED,
        note="it counts every process as a data-parallel one",
    ),
    Row(
        "BatchSizeFinder",
        "batch_size_finder test_scale_batch_size_is_refused",
        NOWHERE,
        note="also `Tuner.scale_batch_size`",
    ),
)
