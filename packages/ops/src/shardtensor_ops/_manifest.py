"""Which module serves which operator. Light: nothing of torch is imported here."""

from __future__ import annotations

_FAMILIES = {
    "shardtensor_ops.random": """
        aten.bernoulli_.float aten.uniform_ aten.normal_ aten.exponential_ aten.cauchy_ aten.geometric_
        aten.log_normal_ aten.random_ aten.native_dropout torch.feature_dropout torch.feature_dropout_
        torch.feature_alpha_dropout torch.feature_alpha_dropout_
    """,
    "shardtensor_ops.adaptive_pool": """
        torch.nn.functional.adaptive_avg_pool1d torch.nn.functional.adaptive_max_pool1d
        torch.nn.functional.adaptive_max_pool1d_with_indices torch.nn.functional.adaptive_avg_pool2d
        torch.nn.functional.adaptive_max_pool2d torch.nn.functional.adaptive_max_pool2d_with_indices
        torch.nn.functional.adaptive_avg_pool3d torch.nn.functional.adaptive_max_pool3d
        torch.nn.functional.adaptive_max_pool3d_with_indices torch.adaptive_max_pool1d
    """,
    "shardtensor_ops.interpolate": "torch.nn.functional.interpolate",
    "shardtensor_ops.activation": """
        aten.log_sigmoid_forward aten.glu aten.glu_backward aten.rrelu_with_noise aten.rrelu_with_noise_
        aten.rrelu_with_noise_backward
    """,
    "shardtensor_ops.conv": """
        torch.nn.functional.conv1d torch.nn.functional.conv2d torch.nn.functional.conv3d
        torch.nn.functional.conv_transpose1d torch.nn.functional.conv_transpose2d torch.nn.functional.conv_transpose3d
        torch.convolution
    """,
    "shardtensor_ops.embedding": """
        aten.embedding aten.embedding_dense_backward aten.index_select torch.index_select torch.Tensor.index_select
    """,
    "shardtensor_ops.indexing": """
        torch.Tensor.__getitem__ torch.select torch.Tensor.select torch.narrow torch.Tensor.narrow torch.diagonal
        torch.Tensor.diagonal torch.functional.split torch.Tensor.split torch.chunk torch.Tensor.chunk
        torch.split_with_sizes torch.Tensor.split_with_sizes torch.unsafe_split torch.Tensor.unsafe_split
        torch.unsafe_chunk torch.Tensor.unsafe_chunk torch.unsafe_split_with_sizes
        torch.Tensor.unsafe_split_with_sizes torch.unbind torch.Tensor.unbind
    """,
    "shardtensor_ops.inplace_view": """
        aten.unsqueeze_ aten.squeeze_ aten.t_ aten.transpose_ aten.as_strided
    """,
    "shardtensor_ops.loss": """
        aten.mse_loss aten.mse_loss_backward aten.smooth_l1_loss aten.smooth_l1_loss_backward aten.huber_loss
        aten.huber_loss_backward aten.soft_margin_loss aten.soft_margin_loss_backward aten.binary_cross_entropy
        aten.binary_cross_entropy_backward aten.binary_cross_entropy_with_logits aten.multi_margin_loss
        aten.multi_margin_loss_backward aten.multilabel_margin_loss_forward aten.multilabel_margin_loss_backward
        aten.nll_loss_forward aten.nll_loss_backward aten.nll_loss2d_forward aten.nll_loss2d_backward
    """,
    "shardtensor_ops.einsum": "torch.functional.einsum",
    "shardtensor_ops.linear": "torch.nn.functional.linear",
    "shardtensor_ops.matmul": """
        aten.mm aten.bmm aten.mv aten.dot aten.vdot aten.ger aten.addmm aten.baddbmm aten.addbmm aten.addmv aten.addr
        aten.linear aten.matmul aten._trilinear torch.matmul torch.linalg.matmul torch.Tensor.matmul
        torch.Tensor.__matmul__ torch.Tensor.__rmatmul__
    """,
    "shardtensor_ops.pad": "torch.nn.functional.pad torch.constant_pad_nd",
    "shardtensor_ops.pointwise": """
        tag:pointwise aten.where aten.prelu aten._prelu_kernel aten._prelu_kernel_backward aten.gelu_backward
        aten.silu_backward aten.threshold_backward aten.leaky_relu_backward aten.elu_backward aten.hardtanh_backward
        aten.hardsigmoid_backward aten.hardswish_backward aten.hardswish aten.hardswish_ aten.softplus_backward
        aten.softshrink_backward aten.hardshrink_backward aten.log_sigmoid_backward aten.mish_backward
        aten.sigmoid_backward aten.tanh_backward aten.logit_backward aten.rsub aten.masked_fill aten.masked_fill_
        aten.fill aten.fill_ aten.zero_ aten.isfinite aten.isnan aten.isinf aten.nan_to_num aten.clamp aten.clamp_
        aten.lerp aten.lerp_ aten.addcmul aten.addcmul_ aten.addcdiv aten.addcdiv_ aten.bernoulli
        aten.native_dropout_backward aten.abs_ aten.copysign_ aten.eq_ aten.gcd_ aten.ge_ aten.gelu_ aten.gt_
        aten.heaviside_ aten.lcm_ aten.le_ aten.lt_ aten.mish_ aten.ne_ aten.threshold_ aten.xlogy_
    """,
    "shardtensor_ops.norm": """
        torch.nn.functional.layer_norm torch.nn.functional.rms_norm torch.nn.functional.group_norm
        torch.nn.functional.instance_norm torch.nn.functional.batch_norm aten.native_layer_norm
        aten.native_layer_norm_backward aten._fused_rms_norm aten._fused_rms_norm_backward aten.native_group_norm
        aten.native_group_norm_backward
    """,
    "shardtensor_ops.reduce": """
        torch.sum torch.Tensor.sum torch.mean torch.Tensor.mean torch.nansum torch.Tensor.nansum torch.nanmean
        torch.Tensor.nanmean torch.prod torch.Tensor.prod torch.max torch.Tensor.max torch.min torch.Tensor.min
        aten.sum aten.mean aten.nansum aten.prod aten.count_nonzero aten.any aten.all aten.amax aten.amin
        aten.max.default aten.min.default aten.max.dim aten.min.dim aten.aminmax aten.argmax aten.argmin aten.var
        aten.std aten.var_mean aten.std_mean aten.linalg_vector_norm aten.norm aten.logsumexp aten.median.dim
        aten.nanmedian.dim aten.mode aten.kthvalue
    """,
    "shardtensor_ops.pool": """
        torch.nn.functional.max_pool1d torch.max_pool1d torch.nn.functional.max_pool1d_with_indices
        torch.nn.functional.avg_pool1d torch.nn.functional.max_pool2d torch.max_pool2d
        torch.nn.functional.max_pool2d_with_indices torch.nn.functional.avg_pool2d torch.nn.functional.max_pool3d
        torch.max_pool3d torch.nn.functional.max_pool3d_with_indices torch.nn.functional.avg_pool3d
        torch.max_pool1d_with_indices
    """,
    "shardtensor_ops.cat": """
        aten.cat aten.stack
    """,
    "shardtensor_ops.roll": """
        aten.roll aten.flip aten.repeat aten.rot90 aten.pixel_shuffle aten.pixel_unshuffle aten.channel_shuffle
        aten.native_channel_shuffle
    """,
    "shardtensor_ops.select": """
        aten.slice.Tensor aten.slice_copy.Tensor aten.slice_backward aten.select.int aten.select_copy.int
        aten.select_backward aten.unbind aten.unbind_copy aten.slice_scatter aten.select_scatter aten.split.Tensor
        aten.split_with_sizes aten.unsafe_split.Tensor aten.unsafe_split_with_sizes aten.diagonal aten.diagonal_copy
        aten.diagonal_backward
    """,
    "shardtensor_ops.softmax": """
        aten._softmax aten._log_softmax aten._safe_softmax aten._softmax_backward_data aten._log_softmax_backward_data
    """,
    "shardtensor_ops.view": """
        aten.view aten._unsafe_view aten._reshape_alias aten.view_copy aten._reshape_copy aten.permute
        aten.permute_copy aten.transpose aten.transpose_copy aten.t aten.t_copy aten.numpy_T aten.unsqueeze
        aten.unsqueeze_copy aten.squeeze aten.squeeze_copy aten.expand aten.expand_copy
    """,
}

MANIFEST: dict[str, str] = {name: module for module, names in _FAMILIES.items() for name in names.split()}
"""Operator name -> module. ``tag:pointwise`` stands for every operator that torch tags so."""


def names_served_by(module: str) -> list[str]:
    """Operators of one module, for a module that serves all of its operators by one rule."""
    return _FAMILIES[module].split()
