// Host path of the fused continual norm in eager mode: replays the launches of Triton's compiled kernels.
//
// In an eager loop with small batches the host is the limit. A call through Python takes about 190 microseconds per
// layer, forward and backward, of which the launches themselves take less than a tenth. This extension repeats the
// launches of an earlier call with the same signature (sizes, layout, dtypes, alignment): Python makes the first call,
// with all its checks, and registers its launches here. Everything that the checks depend on is part of the signature.
// A signature that is not registered, and everything that is not plain eager mode, is answered with None, and Python
// takes over. The kernels, their grids and their arguments are the same on both paths, and so are the bits.
//
// No CUDA header or library is needed: the functions of the driver are given as addresses.

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge::function);  // another smart pointer in other versions of torch

// --- the driver -------------------------------------------------------------------------------------------------

// The parts of CUlaunchConfig and CUlaunchAttribute that a launch needs; their layout is fixed by the driver's ABI.
struct Attribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    int on;
    unsigned size[3];
  } value;
};
constexpr int COOPERATIVE = 2, CLUSTER_SIZE = 4, CLUSTER_POLICY = 5, PROGRAMMATIC_SERIALIZATION = 6;
constexpr int SPREAD = 1;  // the policy of Triton's launcher

struct Configuration {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared;
  void* stream;
  Attribute* attributes;
  unsigned number_of_attributes;
};

using LaunchFunction = int (*)(const Configuration*, void* function, void** arguments, void** extra);
using StreamFunction = int (*)(int device, void** stream);
using SizeFunction = int (*)(void* function, size_t index, size_t* offset, size_t* size);

LaunchFunction launch_kernel = nullptr;
StreamFunction current_stream = nullptr;
SizeFunction argument_size = nullptr;
PyObject* backward_in_python = nullptr;

// --- launches ---------------------------------------------------------------------------------------------------

// Tensors of a pass, named as the arguments of the kernels. Those up to MOMENTUM, and DY and Y, are inputs.
enum Role { X, WEIGHT, BIAS, RESIDUAL, RUN_MEAN, RUN_VAR, COUNTER, MOMENTUM, DY, Y, TABLE, PART, SLAB, DX, DR, DWEIGHT, DBIAS, ROLES };
constexpr std::array<std::string_view, ROLES> TENSOR_NAMES = {
    "x_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "run_mean_ptr", "run_var_ptr", "counter_ptr", "momentum_ptr", "dy_ptr",
    "y_ptr", "table_ptr", "part_ptr", "slab_ptr", "dx_ptr", "dr_ptr", "dweight_ptr", "dbias_ptr"};
enum Number { WEIGHT_OF_BATCH, FACTOR, EPS, NUMBERS };
constexpr std::array<std::string_view, NUMBERS> NUMBER_NAMES = {"momentum", "factor", "eps"};
enum Mode { TRAINING, BACKWARD, EVALUATION };

using Pointers = std::array<void*, ROLES>;
using Numbers = std::array<float, NUMBERS>;

struct Argument {
  enum Kind { TENSOR, NUMBER, INTEGER } kind;
  int index = 0;
  int64_t value = 0;
};

struct Launch {
  void* function;
  std::array<unsigned, 3> grid;
  unsigned threads, shared;
  unsigned cluster;  // thread blocks of a cluster; 1 for none
  bool cooperative, overlapping;
  std::vector<Argument> arguments;
};

struct Plan {
  std::vector<Launch> launches;
  int64_t part = 0, slab = 0;  // values of the two scratch tensors
};

void launch(const Launch& each, Pointers& pointers, Numbers& numbers, void* stream) {
  constexpr size_t MOST = 40;
  std::array<void*, MOST> arguments;
  void* none = nullptr;
  size_t count = 0;
  for (const auto& argument : each.arguments) {
    switch (argument.kind) {
      case Argument::TENSOR: arguments[count++] = &pointers[argument.index]; break;
      case Argument::NUMBER: arguments[count++] = &numbers[argument.index]; break;
      default: arguments[count++] = const_cast<int64_t*>(&argument.value);  // little-endian: also right for 32 bits
    }
  }
  arguments[count++] = &none;  // Triton appends two scratch pointers to the arguments of every kernel
  arguments[count++] = &none;
  Attribute attributes[4];
  unsigned number = 0;
  if (each.cluster > 1) {
    attributes[number++] = {CLUSTER_SIZE, {}, {.size = {each.cluster, 1, 1}}};
    attributes[number++] = {CLUSTER_POLICY, {}, {.on = SPREAD}};
  }
  if (each.cooperative) attributes[number++] = {COOPERATIVE, {}, {.on = 1}};
  if (each.overlapping) attributes[number++] = {PROGRAMMATIC_SERIALIZATION, {}, {.on = 1}};
  const Configuration configuration{
      {each.grid[0], each.grid[1], each.grid[2]}, {each.threads, 1, 1}, each.shared, stream, attributes, number};
  const int code = launch_kernel(&configuration, each.function, arguments.data(), nullptr);
  TORCH_CHECK(code == 0, "continual norm: the launch of a kernel failed with CUDA error ", code);
}

void* stream_of(const Tensor& x) {
  void* stream = nullptr;
  const int code = current_stream(x.is_cuda() ? x.get_device() : -1, &stream);
  TORCH_CHECK(code == 0, "continual norm: the current CUDA stream is not known");
  return stream;
}

// --- signatures -------------------------------------------------------------------------------------------------

// All properties of a call that plans, compiled kernels and checks of arguments depend on.
using Signature = std::array<int64_t, 8>;

struct Hash {
  size_t operator()(const Signature& signature) const {
    uint64_t hash = 0xcbf29ce484222325;
    for (const auto part : signature) hash = std::rotl((hash ^ static_cast<uint64_t>(part)) * 0x9e3779b97f4a7c15, 29);
    return hash;
  }
};

struct Sizes {
  int64_t samples, channels, length;
  bool last;  // channels_last layout
};

std::unordered_map<Signature, Plan, Hash> plans;
std::shared_mutex plans_mutex;  // backward passes look plans up without the GIL
constexpr size_t PLAN_LIMIT = 4096;

// Whether the strides are those of a dense tensor, contiguous or channels_last; strides of dimensions of size 1 are free.
bool is_dense(const Tensor& x, bool last) {
  const auto sizes = x.sizes(), strides = x.strides();
  int64_t expected = 1;
  const auto matches = [&](int64_t d) {
    const bool right = sizes[d] == 1 || strides[d] == expected;
    expected *= sizes[d];
    return right;
  };
  if (last && !matches(1)) return false;
  for (int64_t d = x.dim() - 1; d > 0; --d)
    if (!(last && d == 1) && !matches(d)) return false;
  return matches(0);
}

bool sizes_of(const Tensor& x, Sizes& sizes) {
  if (x.dim() < 2 || x.dim() > 5 || x.numel() == 0) return false;
  sizes.samples = x.size(0);
  sizes.channels = x.size(1);
  sizes.length = x.numel() / (sizes.samples * sizes.channels);
  const bool contiguous = x.is_contiguous();
  sizes.last = sizes.length == 1 || !contiguous;
  return contiguous || is_dense(x, true);
}

// One byte per tensor: present, aligned to 16 bytes (Triton compiles other code for it), dtype.
int64_t described(const Tensor& tensor) {
  if (!tensor.defined()) return 0;
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  return 1 | (aligned ? 2 : 0) | static_cast<int64_t>(tensor.scalar_type()) << 2;
}

// Whether a parameter, moment or counter can be given to a kernel: plain, contiguous, and on the device of the input.
bool fits(const Tensor& tensor, const Tensor& x, int64_t dim, int64_t size) {
  return !tensor.defined() ||
      (tensor.dim() == dim && tensor.numel() == size && tensor.is_contiguous() && tensor.device() == x.device());
}

Signature signature_of(
    Mode mode, const Tensor& x, const Sizes& sizes, int64_t groups, bool relu, bool residual, std::initializer_list<Tensor> tensors) {
  int64_t kinds = 0, more = 0;
  int count = 0;
  for (const auto& tensor : tensors) {
    (count < 8 ? kinds : more) |= described(tensor) << (8 * (count % 8));
    ++count;
  }
  const int64_t flags = mode | relu << 2 | residual << 3 | sizes.last << 4 | x.dim() << 5 | int64_t(x.is_cuda()) << 8;
  return {flags, x.get_device(), sizes.samples, sizes.channels, sizes.length, groups, kinds, more};
}

const Plan* find(const Signature& signature) {
  const std::shared_lock lock(plans_mutex);
  const auto found = plans.find(signature);
  return found == plans.end() ? nullptr : &found->second;  // entries stay where they are until `forget`
}

// Whether the call is one of plain eager mode: no dispatch mode, functorch transform, forward-mode AD or tracer.
bool is_plain() {
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
      torch::autograd::ForwardADLevel::try_get_by_idx(0) == nullptr && !torch::jit::tracer::isTracing();
}

Tensor scratch(const Tensor& x, int64_t size) {
  return at::empty({size}, x.options().dtype(at::kFloat).memory_format(std::nullopt));
}

void* pointer(const Tensor& tensor) { return tensor.defined() ? tensor.data_ptr() : nullptr; }

// --- backward ---------------------------------------------------------------------------------------------------

struct Settings {
  double eps;
  int64_t groups;
  bool relu, residual;
};

Tensor typed(Tensor gradient, const Tensor& parameter) {
  if (!parameter.defined()) return {};
  return gradient.scalar_type() == parameter.scalar_type() ? gradient : gradient.to(parameter.scalar_type());
}

struct ContinualNormBackward : public Node {
  SavedVariable x_, y_, weight_, bias_, table_;
  Settings settings{};

  std::string name() const override { return "ContinualNormBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* saved : {&x_, &y_, &weight_, &bias_, &table_}) saved->reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    Tensor dy = gradients[0];
    if (!dy.defined()) return variable_list(4);
    const Tensor x = x_.unpack(), y = y_.unpack(getptr()), weight = weight_.unpack(), bias = bias_.unpack(), table = table_.unpack();
    if (at::GradMode::is_enabled() || !is_plain_gradient(dy, x)) return in_python(dy, x, y, weight, bias, table);
    const at::AutoDispatchBelowAutograd below;
    Sizes sizes;
    // Hooks on saved tensors may have changed layouts.
    if (!sizes_of(x, sizes) || (y.defined() && !is_dense(y, sizes.last)) || !dy.sizes().equals(x.sizes()) || dy.scalar_type() != x.scalar_type())
      return in_python(dy, x, y, weight, bias, table);
    if (!is_dense(dy, sizes.last)) dy = at::empty_like(x).copy_(dy);
    const auto plan = find(signature_of(BACKWARD, x, sizes, settings.groups, settings.relu, settings.residual, {dy, x, y, weight, bias, table}));
    if (plan == nullptr) return in_python(dy, x, y, weight, bias, table);
    Tensor dx = at::empty_like(x), dweight = scratch(x, sizes.channels), dbias = scratch(x, sizes.channels);
    Tensor dresidual = settings.relu && settings.residual ? at::empty_like(x) : Tensor();
    const Tensor part = plan->part ? scratch(x, plan->part) : Tensor(), slab = plan->slab ? scratch(x, plan->slab) : Tensor();
    Pointers pointers{};
    pointers[X] = pointer(x);
    pointers[DY] = pointer(dy);
    pointers[Y] = pointer(y);
    pointers[WEIGHT] = pointer(weight);
    pointers[BIAS] = pointer(bias);
    pointers[TABLE] = pointer(table);
    pointers[PART] = pointer(part);
    pointers[SLAB] = pointer(slab);
    pointers[DX] = pointer(dx);
    pointers[DR] = pointer(dresidual);
    pointers[DWEIGHT] = pointer(dweight);
    pointers[DBIAS] = pointer(dbias);
    Numbers numbers{0.0f, 1.0f, static_cast<float>(settings.eps)};
    const c10::DeviceGuard guard(x.device());
    void* stream = stream_of(x);
    for (const auto& each : plan->launches) launch(each, pointers, numbers, stream);
    variable_list results(4);
    results[0] = std::move(dx);
    results[1] = typed(std::move(dweight), weight);
    results[2] = typed(std::move(dbias), bias);
    if (settings.residual) results[3] = settings.relu ? std::move(dresidual) : gradients[0];
    return results;
  }

  // The gradients by Python, which registers its launches, and also computes gradients that can be differentiated.
  variable_list in_python(
      const Tensor& dy, const Tensor& x, const Tensor& y, const Tensor& weight, const Tensor& bias, const Tensor& table) {
    const pybind11::gil_scoped_acquire gil;
    const auto optional = [](const Tensor& tensor) {
      return tensor.defined() ? pybind11::cast(tensor) : pybind11::object(pybind11::none());
    };
    const auto function = pybind11::reinterpret_borrow<pybind11::object>(backward_in_python);
    const pybind11::tuple returned = function(
        dy, x, optional(y), optional(weight), optional(bias), table, settings.eps, settings.groups, settings.relu, settings.residual);
    variable_list results(4);
    for (size_t i = 0; i < 4; ++i)
      if (!returned[i].is_none()) results[i] = returned[i].cast<Tensor>();
    return results;
  }

  static bool is_plain_gradient(const Tensor& dy, const Tensor& x) {
    constexpr auto special = c10::DispatchKeySet(
        {c10::DispatchKey::Python, c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched,
         c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize, c10::DispatchKey::ZeroTensor,
         c10::DispatchKey::Negative, c10::DispatchKey::Conjugate});
    return is_plain() && !dy.key_set().has_any(special) && !x.key_set().has_any(special) && dy.device() == x.device() &&
        dy.layout() == at::kStrided;
  }

  // Compiled autograd traces the Python function, in which the gradients are an operator.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(x_, false);
    args.collect(y_, true);
    args.collect(weight_, false);
    args.collect(bias_, false);
    args.collect(table_, false);
    args.collect(settings.eps);
    args.collect(settings.groups);
    args.collect(settings.relu);
    args.collect(settings.residual);
  }

  variable_list apply_with_saved(const variable_list& gradients, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    for (auto* each : {&x_, &y_, &weight_, &bias_, &table_}) saved.before(*each);
    auto results = apply(variable_list(gradients));
    for (auto* each : {&x_, &y_, &weight_, &bias_, &table_}) saved.after(*each);
    return results;
  }
};

template <typename Pointer>
Pointer new_node(ContinualNormBackward*& node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    node = new ContinualNormBackward();
    return Pointer(node, [](auto* each) { deleteNode(each); });  // not recursive, unlike delete
  } else {
    auto made = c10::make_intrusive<ContinualNormBackward>();
    node = made.get();
    return made;
  }
}

// --- forward ----------------------------------------------------------------------------------------------------

// A tensor argument: None, or exactly a Tensor or Parameter; subclasses are not plain.
bool read(PyObject* object, Tensor& tensor) {
  if (object == Py_None) return true;
  if (!THPVariable_CheckExact(object)) return false;
  tensor = THPVariable_Unpack(object);
  return tensor.layout() == at::kStrided && !tensor.is_neg() && !tensor.is_conj() && !tensor._is_zerotensor();
}

struct Call {
  Tensor x, weight, bias, residual, mean, var, counter, momentum;
  double weight_of_batch = 0.0;
  Settings settings{};
  Sizes sizes{};
  bool training = false, moves = false;

  // Reads (x, mean, var, weight, bias, training, momentum, eps, groups, relu, residual, counter); false if Python must take over.
  bool read_arguments(PyObject* const* args) {
    const bool tensors = read(args[0], x) && read(args[1], mean) && read(args[2], var) && read(args[3], weight) &&
        read(args[4], bias) && read(args[10], residual) && read(args[11], counter);
    if (!tensors || !x.defined() || mean.defined() != var.defined()) return false;
    if (!PyBool_Check(args[5]) || !PyFloat_CheckExact(args[7]) || !PyLong_CheckExact(args[8]) || !PyBool_Check(args[9])) return false;
    training = args[5] == Py_True || !mean.defined();
    int overflow = 0;  // a number of groups beyond 64 bits, which Python refuses
    settings = {PyFloat_AS_DOUBLE(args[7]), PyLong_AsLongLongAndOverflow(args[8], &overflow), args[9] == Py_True, residual.defined()};
    if (overflow != 0) return false;
    if (!(settings.eps > 0.0 && settings.eps < 1.0)) return false;
    if (PyFloat_CheckExact(args[6])) {
      weight_of_batch = PyFloat_AS_DOUBLE(args[6]);
      if (!(weight_of_batch >= 0.0 && weight_of_batch <= 1.0)) return false;
      moves = weight_of_batch != 0.0;
    } else {
      if (!read(args[6], momentum) || !momentum.defined()) return false;
      moves = true;
    }
    moves = moves && training && mean.defined();
    if (training && !moves) mean = var = Tensor();
    if (!moves) momentum = Tensor();
    // A batch that moves nothing is still counted; that is rare, and Python does it.
    if (counter.defined() && training && !moves) return false;
    if (!training) counter = Tensor();
    return fits_together();
  }

  bool fits_together() {
    if (!sizes_of(x, sizes)) return false;
    const auto channels = sizes.channels;
    if (!fits(weight, x, 1, channels) || !fits(bias, x, 1, channels) || !fits(mean, x, 1, channels) || !fits(var, x, 1, channels)) return false;
    if (!fits(counter, x, 0, 1) || !fits(momentum, x, 0, 1)) return false;
    return !residual.defined() ||
        (residual.sizes().equals(x.sizes()) && residual.scalar_type() == x.scalar_type() && residual.device() == x.device() &&
         is_dense(residual, sizes.last));
  }

  Signature signature() const {
    return signature_of(
        training ? TRAINING : EVALUATION, x, sizes, settings.groups, settings.relu, settings.residual,
        {x, weight, bias, residual, mean, var, counter, momentum});
  }

  // The names of the moments differ: training updates them, evaluation reads them.
  Pointers pointers() const {
    Pointers all{};
    all[X] = pointer(x);
    all[WEIGHT] = pointer(weight);
    all[BIAS] = pointer(bias);
    all[RESIDUAL] = pointer(residual);
    all[RUN_MEAN] = pointer(mean);
    all[RUN_VAR] = pointer(var);
    all[COUNTER] = pointer(counter);
    all[MOMENTUM] = pointer(momentum);
    return all;
  }

  Tensor run(const Plan& plan) {
    const bool recorded = training && torch::autograd::compute_requires_grad(x, weight, bias, residual);
    ContinualNormBackward* node = nullptr;
    NodePointer history;
    if (recorded) {
      history = new_node<NodePointer>(node);
      history->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias, residual));
    }
    Tensor y, table;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      y = at::empty_like(x);
      const auto n = sizes.samples, c = sizes.channels;
      if (training) table = scratch(x, 2 * (c + n * (c + settings.groups)));
      const Tensor part = plan.part ? scratch(x, plan.part) : Tensor();
      auto all = pointers();
      all[Y] = pointer(y);
      all[TABLE] = pointer(table);
      all[PART] = pointer(part);
      const auto count = static_cast<double>(n * sizes.length);
      const auto factor = moves ? count / (count - 1) : 1.0;
      Numbers numbers{static_cast<float>(weight_of_batch), static_cast<float>(factor), static_cast<float>(settings.eps)};
      const c10::DeviceGuard guard(x.device());
      void* stream = stream_of(x);
      for (const auto& each : plan.launches) launch(each, all, numbers, stream);
    }
    if (moves) {  // tells autograd of the in-place update, as an operator does
      mean.unsafeGetTensorImpl()->bump_version();
      var.unsafeGetTensorImpl()->bump_version();
      if (counter.defined()) counter.unsafeGetTensorImpl()->bump_version();
    }
    if (recorded) {
      node->x_ = SavedVariable(x, false);
      node->weight_ = SavedVariable(weight, false);
      node->bias_ = SavedVariable(bias, false);
      node->table_ = SavedVariable(table, false);
      node->settings = settings;
      torch::autograd::set_history(y, history);
      // Without a residual, the sign of the output is recomputed from the tables: saving y would need more memory.
      if (settings.relu && settings.residual) node->y_ = SavedVariable(y, true);
    }
    return y;
  }
};

// --- the Python module ------------------------------------------------------------------------------------------

// normalize(x, mean, var, weight, bias, training, momentum, eps, groups, relu, residual, counter) -> Tensor | None
PyObject* normalize(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Call call;
  if (count == 12 && is_plain() && call.read_arguments(args)) {
    const bool differentiable = !call.training && torch::autograd::compute_requires_grad(call.x, call.weight, call.bias, call.residual);
    const auto plan = differentiable ? nullptr : find(call.signature());  // Python has the gradients of evaluation
    if (plan != nullptr) return THPVariable_Wrap(call.run(*plan));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

int index_of(const auto& names, std::string_view name) {
  for (size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return static_cast<int>(i);
  return -1;
}

Argument argument_of(std::string_view name, std::string_view type, const pybind11::handle& value, Mode mode) {
  if (mode == EVALUATION && name == "mean_ptr") name = "run_mean_ptr";
  if (mode == EVALUATION && name == "var_ptr") name = "run_var_ptr";
  if (type.starts_with('*')) {
    const auto index = index_of(TENSOR_NAMES, name);
    if (index < 0) throw pybind11::value_error("unknown tensor argument " + std::string(name));
    return {Argument::TENSOR, index};
  }
  if (type == "fp32") {
    const auto index = index_of(NUMBER_NAMES, name);
    if (index < 0) throw pybind11::value_error("unknown number " + std::string(name));
    return {Argument::NUMBER, index};
  }
  if (type == "i32" || type == "i64") return {Argument::INTEGER, 0, value.cast<int64_t>()};
  throw pybind11::value_error("argument " + std::string(name) + " has the unknown type " + std::string(type));
}

// Raises unless the kernel takes exactly these arguments: others would be read as wrong values.
void check_arguments(const Launch& each, const std::vector<size_t>& sizes) {
  if (argument_size == nullptr) return;
  size_t offset = 0, size = 0, count = 0;
  while (argument_size(each.function, count, &offset, &size) == 0) {
    if (count >= sizes.size() || size != sizes[count])
      throw pybind11::value_error("a kernel has other arguments than expected");
    ++count;
  }
  if (count != sizes.size()) throw pybind11::value_error("a kernel has fewer arguments than expected");
}

using Description = std::tuple<uint64_t, std::array<unsigned, 3>, unsigned, unsigned, unsigned, bool, bool, pybind11::list>;

Launch launch_of(const Description& description, Mode mode) {
  const auto& [function, grid, threads, shared, cluster, cooperative, overlapping, arguments] = description;
  Launch made{reinterpret_cast<void*>(function), grid, threads, shared, cluster, cooperative, overlapping, {}};
  std::vector<size_t> sizes;
  for (const auto& each : arguments) {
    const auto [name, type, value] = each.cast<std::tuple<std::string, std::string, pybind11::object>>();
    made.arguments.push_back(argument_of(name, type, value, mode));
    sizes.push_back(type.starts_with('*') || type == "i64" ? 8 : 4);
  }
  if (sizes.size() > 38) throw pybind11::value_error("a kernel has too many arguments");
  sizes.insert(sizes.end(), 2, 8);
  check_arguments(made, sizes);
  return made;
}

void add(const Signature& signature, Plan&& plan) {
  const std::unique_lock lock(plans_mutex);
  if (plans.size() < PLAN_LIMIT) plans.try_emplace(signature, std::move(plan));
}

Plan plan_of(const std::vector<Description>& launches, Mode mode, int64_t part, int64_t slab) {
  Plan plan{{}, part, slab};
  for (const auto& each : launches) plan.launches.push_back(launch_of(each, mode));
  return plan;
}

// Registers the launches of a forward pass with the arguments of `normalize`; returns whether it can be replayed.
bool register_forward(const pybind11::tuple& args, const std::vector<Description>& launches, int64_t part) {
  Call call;
  std::vector<PyObject*> objects;
  for (const auto& each : args) objects.push_back(each.ptr());
  if (objects.size() != 12 || !call.read_arguments(objects.data())) return false;
  add(call.signature(), plan_of(launches, call.training ? TRAINING : EVALUATION, part, 0));
  return true;
}

bool register_backward(
    const Tensor& dy, const Tensor& x, const std::optional<Tensor>& y, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, const Tensor& table, int64_t groups, bool relu, bool residual,
    const std::vector<Description>& launches, int64_t part, int64_t slab) {
  Sizes sizes;
  const auto plain = [](const std::optional<Tensor>& tensor) { return tensor.value_or(Tensor()); };
  if (!sizes_of(x, sizes) || !is_dense(dy, sizes.last) || !fits(plain(weight), x, 1, sizes.channels) || !fits(plain(bias), x, 1, sizes.channels))
    return false;
  if (y && !is_dense(*y, sizes.last)) return false;
  add(signature_of(BACKWARD, x, sizes, groups, relu, residual, {dy, x, plain(y), plain(weight), plain(bias), table}),
      plan_of(launches, BACKWARD, part, slab));
  return true;
}

// Sets the functions of the driver, by address, and the Python function of the backward pass.
void set_up(uint64_t launch, uint64_t stream, uint64_t size, pybind11::object backward) {
  launch_kernel = reinterpret_cast<LaunchFunction>(launch);
  current_stream = reinterpret_cast<StreamFunction>(stream);
  argument_size = reinterpret_cast<SizeFunction>(size);
  Py_XDECREF(backward_in_python);
  backward_in_python = backward.release().ptr();
}

void forget() {
  const std::unique_lock lock(plans_mutex);
  plans.clear();
}

size_t number_of_plans() {
  const std::shared_lock lock(plans_mutex);
  return plans.size();
}

PyMethodDef NORMALIZE = {
    "normalize", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(normalize)), METH_FASTCALL,
    "Replay the launches of a forward pass; None if Python must take over."};

}  // namespace

PYBIND11_MODULE(MODULE_NAME, module) {
  module.attr("normalize") = pybind11::reinterpret_steal<pybind11::object>(PyCFunction_New(&NORMALIZE, nullptr));
  module.def("register_forward", &register_forward);
  module.def("register_backward", &register_backward);
  module.def("set_up", &set_up);
  module.def("forget", &forget);
  module.def("number_of_plans", &number_of_plans);
}
