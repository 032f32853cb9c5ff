// Tensors that Python hands over, borrowed by DLPack for the time of a call.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>

#include "kernels/kernels.h"

namespace sparkgap {

// A borrowed view of a CPU tensor. Valid while the Python object lives and is not resized.
struct Tensor {
  static constexpr int kMaxDims = 6;

  enum class Type { kFloat32, kFloat64, kBFloat16, kInt8, kUInt8, kInt32, kInt64, kOther };

  PyObject* object = nullptr;  // borrowed
  void* data = nullptr;
  Type type = Type::kOther;
  int dims = 0;
  int64_t shape[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};

  int64_t size(int dim) const { return shape[dim < 0 ? dims + dim : dim]; }
  int64_t stride(int dim) const { return strides[dim < 0 ? dims + dim : dim]; }
  bool is_float() const { return type == Type::kFloat32 || type == Type::kBFloat16; }
  DType dtype() const { return type == Type::kFloat32 ? DType::kFloat32 : DType::kBFloat16; }
  bool contiguous_from(int dim) const;
  std::string describe() const;
};

// False, with no Python error set, when the object is no tensor on the CPU that can be viewed.
bool borrow_tensor(nanobind::handle object, Tensor* out) noexcept;

// Throw std::invalid_argument that names the operand, what it must be and what it is.
void require(bool condition, const char* operand, const char* must_be, const Tensor& tensor);
Matrix as_matrix(const Tensor& tensor, const char* operand);                     // float [rows, features]
HeadRows as_head_rows(const Tensor& tensor, const char* operand);                // float [rows, heads, features]
Vector as_vector(const Tensor& tensor, const char* operand, int64_t size);       // float [size], contiguous
const float* as_floats(const Tensor& tensor, const char* operand);               // float32, contiguous
const int64_t* as_int64(const Tensor& tensor, const char* operand, int64_t n);   // int64 [n], contiguous
const int32_t* as_int32(const Tensor& tensor, const char* operand);              // int32, contiguous

}  // namespace sparkgap

namespace nanobind::detail {

template <>
struct type_caster<sparkgap::Tensor> {
  NB_TYPE_CASTER(sparkgap::Tensor, const_name("torch.Tensor"))

  bool from_python(handle object, uint8_t, cleanup_list*) noexcept { return sparkgap::borrow_tensor(object, &value); }
};

}  // namespace nanobind::detail
