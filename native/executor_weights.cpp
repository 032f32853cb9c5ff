#include <stdexcept>

#include "executor.h"

namespace nb = nanobind;

namespace sparkgap {

std::shared_ptr<PackedWeight> Executor::blank_weight(int64_t out_features, int64_t in_features, const std::string& form,
                                                     bool bias, float input_scale) {
  if (out_features <= 0 || in_features <= 0) throw std::invalid_argument("a weight must not be empty");
  auto weight = std::make_shared<PackedWeight>();
  weight->out_features = out_features, weight->in_features = in_features;
  const size_t channels = weight->channels();
  if (form == "int8") {
    // The largest possible sum, of bytes up to 255 times -127 ... 127, must fit in 32 bits.
    if (in_features > 65536)
      throw std::invalid_argument("an int8 weight has at most 65536 input features, got " + std::to_string(in_features));
    if (!(input_scale >= 0) || input_scale * 0 != 0) throw std::invalid_argument("input_scale must be finite and at least 0");
    weight->form = PackedWeight::Form::kInt8;
    weight->input_scale = input_scale;
    weight->packed = weight_memory_.allocate(channels * ((size_t(in_features) + 3) / 4 * 4));
    weight->scales = weight_memory_.allocate(channels * sizeof(float));
    weight->offsets = weight_memory_.allocate(channels * sizeof(int32_t));
  } else if (form == "bfloat16" || form == "float32") {
    if (input_scale != 0) throw std::invalid_argument("only int8 weights have an input_scale");
    const bool wide = form == "float32";
    weight->form = wide ? PackedWeight::Form::kFloat32 : PackedWeight::Form::kBFloat16;
    weight->packed = weight_memory_.allocate(channels * size_t(in_features) * (wide ? 4 : 2));
  } else {
    throw std::invalid_argument("form must be int8, bfloat16 or float32, got " + form);
  }
  if (bias) weight->bias = weight_memory_.allocate(channels * sizeof(float));
  return weight;
}

std::shared_ptr<PackedWeight> Executor::pack_linear(const Tensor& weight, const std::optional<Tensor>& bias,
                                                    const std::string& form) {
  if (recording_) throw std::logic_error("weights cannot be packed during capture");
  const Matrix rows = as_matrix(weight, "weight");
  auto packed = blank_weight(weight.size(0), weight.size(1), form, bias.has_value(), 0);
  const int64_t out_features = packed->out_features, in_features = packed->in_features;
  const Call call =
      packed->form == PackedWeight::Form::kInt8
          ? make_call(kernels_.pack_int8,
                      PackInt8{rows, out_features, in_features, reinterpret_cast<int8_t*>(packed->packed.get()),
                               reinterpret_cast<float*>(packed->scales.get()),
                               reinterpret_cast<int32_t*>(packed->offsets.get())})
          : make_call(kernels_.pack_float,
                      PackFloat{rows, out_features, in_features, packed->packed.get(),
                                packed->form == PackedWeight::Form::kFloat32 ? DType::kFloat32 : DType::kBFloat16});
  submit({&call, 1}, {&weight});
  if (bias) {
    const Vector values = as_vector(*bias, "bias", out_features);
    const Call copy = make_call(kernels_.convert_rows,
                                ConvertRows{{const_cast<void*>(values.data), out_features, values.dtype},
                                            1,
                                            out_features,
                                            {packed->bias.get(), out_features, DType::kFloat32}});
    submit({&copy, 1}, {&*bias});
  }
  return packed;
}

std::map<std::string, Result> parts_of(const PackedWeight& weight) {
  using Code = nb::dlpack::dtype_code;
  std::map<std::string, Result> parts;
  const auto add = [&](const char* name, const std::shared_ptr<std::byte>& memory, size_t size, nb::dlpack::dtype type) {
    if (!memory) return;
    const nb::capsule owner(new std::shared_ptr<std::byte>(memory),
                            [](void* p) noexcept { delete static_cast<std::shared_ptr<std::byte>*>(p); });
    parts.emplace(name, Result(memory.get(), 1, &size, owner, nullptr, type));
  };
  const nb::dlpack::dtype int8{uint8_t(Code::Int), 8, 1}, float32{uint8_t(Code::Float), 32, 1};
  const nb::dlpack::dtype bfloat16{uint8_t(Code::Bfloat), 16, 1}, int32{uint8_t(Code::Int), 32, 1};
  const size_t channels = weight.channels(), width = size_t(weight.in_features);
  switch (weight.form) {
    case PackedWeight::Form::kInt8: add("packed", weight.packed, channels * ((width + 3) / 4 * 4), int8); break;
    case PackedWeight::Form::kBFloat16: add("packed", weight.packed, channels * width, bfloat16); break;
    case PackedWeight::Form::kFloat32: add("packed", weight.packed, channels * width, float32); break;
  }
  add("scales", weight.scales, channels, float32);
  add("offsets", weight.offsets, channels, int32);
  add("bias", weight.bias, channels, float32);
  return parts;
}

}  // namespace sparkgap
