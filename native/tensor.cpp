#include "tensor.h"

#include <nanobind/ndarray.h>

#include <stdexcept>

namespace nb = nanobind;

namespace sparkgap {

namespace {

// The C exchange table of DLPack 1.2 and later (attribute `__dlpack_c_exchange_api__` of the tensor's type, a capsule
// named "dlpack_exchange_api"): views a tensor in nanoseconds where `__dlpack__` takes microseconds.
struct ExchangeHeader {
  uint32_t major, minor;
  ExchangeHeader* previous;
};

struct ExchangeApi {
  ExchangeHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, nb::dlpack::dltensor* out);  // borrows; -1 with a Python error set
  void* current_work_stream;
};

const ExchangeApi* find_exchange_api(PyTypeObject* type) {
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (!capsule) {
    PyErr_Clear();
    return nullptr;
  }
  auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (!api) PyErr_Clear();
  Py_DECREF(capsule);
  return api && api->header.major == 1 ? api : nullptr;
}

const ExchangeApi* exchange_api(PyTypeObject* type) {
  // Under the GIL. The cached type is kept alive, so that its address cannot come to mean another.
  static PyTypeObject* cached_type = nullptr;
  static const ExchangeApi* cached_api = nullptr;
  if (type == cached_type) return cached_api;
  const ExchangeApi* api = find_exchange_api(type);
  if (api && !cached_type) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    cached_type = type;
    cached_api = api;
  }
  return api;
}

Tensor::Type type_of(nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  using Type = Tensor::Type;
  if (dtype.lanes != 1) return Type::kOther;
  const auto is = [&](Code code, int bits) { return dtype.code == uint8_t(code) && dtype.bits == bits; };
  if (is(Code::Float, 32)) return Type::kFloat32;
  if (is(Code::Float, 64)) return Type::kFloat64;
  if (is(Code::Bfloat, 16)) return Type::kBFloat16;
  if (is(Code::Int, 8)) return Type::kInt8;
  if (is(Code::UInt, 8)) return Type::kUInt8;
  if (is(Code::Int, 32)) return Type::kInt32;
  if (is(Code::Int, 64)) return Type::kInt64;
  return Type::kOther;
}

bool fill(const nb::dlpack::dltensor& view, Tensor* out) {
  constexpr int32_t kCpu = 1;
  if (view.device.device_type != kCpu || view.ndim > Tensor::kMaxDims) return false;
  out->data = static_cast<std::byte*>(view.data) + view.byte_offset;
  out->type = type_of(view.dtype);
  out->dims = view.ndim;
  int64_t dense = 1;
  for (int dim = view.ndim - 1; dim >= 0; dim--) {
    out->shape[dim] = view.shape[dim];
    out->strides[dim] = view.strides ? view.strides[dim] : dense;
    dense *= view.shape[dim];
  }
  return true;
}

const char* name_of(Tensor::Type type) {
  switch (type) {
    case Tensor::Type::kFloat32: return "float32";
    case Tensor::Type::kFloat64: return "float64";
    case Tensor::Type::kBFloat16: return "bfloat16";
    case Tensor::Type::kInt8: return "int8";
    case Tensor::Type::kUInt8: return "uint8";
    case Tensor::Type::kInt32: return "int32";
    case Tensor::Type::kInt64: return "int64";
    default: return "another dtype";
  }
}

}  // namespace

bool borrow_tensor(nb::handle object, Tensor* out) noexcept {
  out->object = object.ptr();
  if (const ExchangeApi* api = exchange_api(Py_TYPE(object.ptr()))) {
    nb::dlpack::dltensor view;
    if (api->tensor_from_object(object.ptr(), &view) == 0) return fill(view, out);
    PyErr_Clear();
    return false;
  }
  // Other exporters, numpy among them.
  nb::ndarray<> array;
  if (!nb::try_cast(object, array)) return false;
  if (array.device_type() != nb::device::cpu::value || array.ndim() > size_t(Tensor::kMaxDims)) return false;
  out->data = array.data();
  out->type = type_of(array.dtype());
  out->dims = int(array.ndim());
  for (int dim = 0; dim < out->dims; dim++) {
    out->shape[dim] = int64_t(array.shape(size_t(dim)));
    out->strides[dim] = array.stride(size_t(dim));
  }
  return true;
}

bool Tensor::contiguous_from(int dim) const {
  int64_t dense = 1;
  for (int i = dims - 1; i >= dim; i--) {
    if (shape[i] != 1 && strides[i] != dense) return false;
    dense *= shape[i];
  }
  return true;
}

std::string Tensor::describe() const {
  std::string text = std::string(name_of(type)) + " [";
  for (int i = 0; i < dims; i++) text += (i ? ", " : "") + std::to_string(shape[i]);
  text += "] with strides [";
  for (int i = 0; i < dims; i++) text += (i ? ", " : "") + std::to_string(strides[i]);
  return text + "]";
}

void require(bool condition, const char* operand, const char* must_be, const Tensor& tensor) {
  if (!condition)
    throw std::invalid_argument(std::string(operand) + " must be " + must_be + ", got " + tensor.describe());
}

Matrix as_matrix(const Tensor& tensor, const char* operand) {
  require(tensor.is_float() && tensor.dims == 2 && tensor.contiguous_from(1), operand,
          "float32 or bfloat16 [rows, features] with contiguous rows", tensor);
  return {tensor.data, tensor.stride(0), tensor.dtype()};
}

HeadRows as_head_rows(const Tensor& tensor, const char* operand) {
  require(tensor.is_float() && tensor.dims == 3 && tensor.contiguous_from(2), operand,
          "float32 or bfloat16 [rows, heads, features] with contiguous features", tensor);
  return {tensor.data, tensor.stride(0), tensor.stride(1), tensor.dtype()};
}

Vector as_vector(const Tensor& tensor, const char* operand, int64_t size) {
  require(tensor.is_float() && tensor.dims == 1 && tensor.contiguous_from(0) && tensor.size(0) == size, operand,
          "a contiguous float32 or bfloat16 vector of the operation's width", tensor);
  return {tensor.data, tensor.dtype()};
}

const float* as_floats(const Tensor& tensor, const char* operand) {
  require(tensor.type == Tensor::Type::kFloat32 && tensor.contiguous_from(0), operand, "contiguous float32", tensor);
  return static_cast<const float*>(tensor.data);
}

const int64_t* as_int64(const Tensor& tensor, const char* operand, int64_t n) {
  require(tensor.type == Tensor::Type::kInt64 && tensor.dims == 1 && tensor.contiguous_from(0) && tensor.size(0) == n, operand,
          "a contiguous int64 vector with one entry a row", tensor);
  return static_cast<const int64_t*>(tensor.data);
}

const int32_t* as_int32(const Tensor& tensor, const char* operand) {
  require(tensor.type == Tensor::Type::kInt32 && tensor.contiguous_from(0), operand, "contiguous int32", tensor);
  return static_cast<const int32_t*>(tensor.data);
}

}  // namespace sparkgap
