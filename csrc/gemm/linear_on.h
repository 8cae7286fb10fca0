// torch.ops.lamina.linear_on (lamina/gemm/op.py) for code that AOTInductor generates: it puts this text behind an
// `extern` of its own, where torch's C functions are declared. Never part of a module of ours.
//
// x [..., k] without gaps, w [cols, k], b [cols] or null -> y [..., cols]. `backend`: three int64 on the CPU, an engine,
// the address of its function (csrc/gemm/module.cpp), and the most rows of bf16 that it is to have; other calls are
// torch's.
AOTITorchError aoti_torch_cpu_linear_on(AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* b,
                                        AtenTensorHandle backend, AtenTensorHandle* y) {
  using Run = int (*)(void*, const void*, const void*, const void*, void*, int, int64_t, int64_t, int64_t, int64_t);
  int64_t dims, numel, *sizes, *steps, *w_sizes, *w_steps, b_step = 1, *b_steps = &b_step;
  int32_t dtype, w_dtype, b_dtype;
  void *facts, *from, *weights, *bias = nullptr, *to;
  if (aoti_torch_get_dim(x, &dims) || aoti_torch_get_numel(x, &numel) || aoti_torch_get_sizes(x, &sizes) ||
      aoti_torch_get_strides(x, &steps) || aoti_torch_get_sizes(w, &w_sizes) || aoti_torch_get_strides(w, &w_steps) ||
      aoti_torch_get_dtype(x, &dtype) || aoti_torch_get_dtype(w, &w_dtype) || aoti_torch_get_data_ptr(x, &from) ||
      aoti_torch_get_data_ptr(w, &weights) || aoti_torch_get_data_ptr(backend, &facts))
    return AOTI_TORCH_FAILURE;
  if (b && (aoti_torch_get_dtype(*b, &b_dtype) || aoti_torch_get_strides(*b, &b_steps) ||
            aoti_torch_get_data_ptr(*b, &bias)))
    return AOTI_TORCH_FAILURE;
  constexpr int64_t kMostDims = 8;
  const int64_t k = w_sizes[1], cols = w_sizes[0], rows = k ? numel / k : 0;
  if (dims < 1 || dims > kMostDims || sizes[dims - 1] != k) return AOTI_TORCH_FAILURE;
  int64_t y_sizes[kMostDims], y_steps[kMostDims];
  for (int64_t d = dims - 1, in = 1, out = 1; d >= 0; --d) {
    if (sizes[d] != 1 && steps[d] != in) return AOTI_TORCH_FAILURE;
    y_sizes[d] = d == dims - 1 ? cols : sizes[d];
    y_steps[d] = out;
    in *= sizes[d], out *= y_sizes[d];
  }
  if (aoti_torch_empty_strided(dims, y_sizes, y_steps, dtype, aoti_torch_device_type_cpu(), 0, y) ||
      aoti_torch_get_data_ptr(*y, &to))
    return AOTI_TORCH_FAILURE;
  const auto* const f = static_cast<const int64_t*>(facts);
  const int type = dtype == aoti_torch_dtype_float32()    ? 0
                   : dtype == aoti_torch_dtype_bfloat16() ? 1
                   : dtype == aoti_torch_dtype_float16()  ? 2
                                                          : -1;
  const bool ours = type >= 0 && (type != 1 || rows <= f[2]) && w_dtype == dtype && w_steps[1] == 1 && rows && cols &&
                    (!b || (b_dtype == dtype && b_steps[0] == 1));
  if (ours)
    return reinterpret_cast<Run>(f[1])(reinterpret_cast<void*>(f[0]), from, weights, bias, to, type, rows, cols, k,
                                       w_steps[0])
               ? AOTI_TORCH_FAILURE
               : AOTI_TORCH_SUCCESS;
  const int64_t flat[2] = {rows, k}, flat_steps[2] = {k, 1};
  const int64_t across[2] = {k, cols}, across_steps[2] = {w_steps[1], w_steps[0]};
  const int64_t out[2] = {rows, cols}, out_steps[2] = {cols, 1};
  int64_t x_at, w_at, y_at;
  AtenTensorHandle left = nullptr, right = nullptr, sums = nullptr;
  const bool failed =
      aoti_torch_get_storage_offset(x, &x_at) || aoti_torch_get_storage_offset(w, &w_at) ||
      aoti_torch_get_storage_offset(*y, &y_at) || aoti_torch__reinterpret_tensor(x, 2, flat, flat_steps, x_at, &left) ||
      aoti_torch__reinterpret_tensor(w, 2, across, across_steps, w_at, &right) ||
      aoti_torch__reinterpret_tensor(*y, 2, out, out_steps, y_at, &sums) ||
      (b ? aoti_torch_cpu_addmm_out(sums, *b, left, right, 1, 1) : aoti_torch_cpu_mm_out(sums, left, right));
  for (AtenTensorHandle made : {left, right, sums})
    if (made) aoti_torch_delete_tensor_object(made);
  return failed ? AOTI_TORCH_FAILURE : AOTI_TORCH_SUCCESS;
}
