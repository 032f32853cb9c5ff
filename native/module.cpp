// The native module's face to Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include "cpu_info.h"
#include "executor.h"
#include "gil.h"
#include "pool.h"
#include "stream.h"
#include "variants.h"

namespace nb = nanobind;
using namespace nb::literals;
using sparkgap::Arena;
using sparkgap::Executor;
using sparkgap::Graph;
using sparkgap::Launch;
using sparkgap::PackedWeight;
using sparkgap::Program;
using sparkgap::Stream;

namespace {

// Kind, graph's name, run, list, call, thread, begin and end.
using TraceRow = std::tuple<std::string, std::string, uint32_t, uint32_t, uint32_t, uint32_t, int64_t, int64_t>;

std::tuple<std::vector<TraceRow>, uint64_t> stop_trace() {
  std::unique_ptr<sparkgap::Trace> trace;
  {
    const sparkgap::GilRelease released;
    trace = sparkgap::Pool::shared().stop_trace();
  }
  if (!trace) throw std::runtime_error("no trace is on");
  std::vector<TraceRow> rows;
  for (const sparkgap::TraceRecord& record : trace->records())
    rows.emplace_back(sparkgap::kind_of(record.signature), sparkgap::interned_name(record.graph), record.run, record.list,
                      record.call, record.thread, record.begin_ns, record.end_ns);
  return {std::move(rows), trace->dropped()};
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Sparkgap's native CPU code.";
  m.def("cpu_features", &sparkgap::cpu_features,
        "Instruction sets the kernels care about, by name: true when CPU and operating system offer them.");
  m.def("usable_cores", &sparkgap::usable_cores, nb::arg("cgroup_root") = "/sys/fs/cgroup",
        nb::arg("cgroup_membership") = "/proc/self/cgroup",
        "Number of cores this process may use: its affinity mask, cut by the cgroup's CPU quota (at least 1).");
  m.def("supported_variants", &sparkgap::supported_variants,
        "Names of the kernel variants that this machine can run, best first.");
  m.def(
      "shutdown_pool",
      [] {
        const sparkgap::GilRelease released;
        sparkgap::Pool::shared().shutdown();
      },
      "End the process's compute threads; the next operation starts them again.");
  m.def(
      "stop_streams",
      [] {
        const sparkgap::GilRelease released;
        Stream::stop_all();
      },
      "End every stream of the process: what runs ends, what waits fails, and nothing can be launched any more.");

  m.def("now_ns", &sparkgap::now_ns, "Nanoseconds of the clock that traces are of.");
  m.def(
      "start_trace",
      [](size_t capacity) {
        const sparkgap::GilRelease released;
        sparkgap::Pool::shared().start_trace(capacity);
      },
      "capacity"_a, "Keep when each thread ran each kernel call, the last `capacity` of each thread, until `stop_trace`.");
  m.def("stop_trace", &stop_trace,
        "End the trace: of each thread's part of each call (kind, graph's name, run, list, call, thread, begin, end), by "
        "begin, and the number of those that were given up for later ones.");

  nb::class_<PackedWeight>(m, "PackedWeight", "A linear layer's weight in packed form.")
      .def_ro("out_features", &PackedWeight::out_features)
      .def_ro("in_features", &PackedWeight::in_features)
      .def_ro("input_scale", &PackedWeight::input_scale)
      .def("parts", &sparkgap::parts_of)
      .def("scales", [](const PackedWeight& self) {
        const auto values = self.scale_values();
        return std::vector<float>(values.begin(), values.end());
      });

  nb::class_<Arena>(m, "Arena", "Memory for what captured calls compute, shared by graphs that never run together.")
      .def(nb::init<>())
      .def_prop_ro("bytes", &Arena::bytes)
      .def("alias", &sparkgap::alias, "tensor"_a);

  nb::class_<Graph>(m, "Graph", "A recorded list of kernel calls with bound pointers.")
      .def(nb::init<int, std::shared_ptr<Arena>, const std::string&>(), "threads"_a, "arena"_a, "name"_a = "")
      .def("replay", &Graph::replay, "Run the recorded calls; the GIL is released meanwhile.")
      .def("kinds", &Graph::kinds, "Kind of each recorded call.")
      .def("profile", &Graph::profile, "repeats"_a,
           "Shortest nanoseconds of each thread's share of each call, run on this thread alone: [calls * threads].")
      .def_prop_ro("bytes", &Graph::bytes)
      .def("__len__", &Graph::size);

  nb::class_<Program>(m, "Program", "Graphs that one launch replays one after another.")
      .def(nb::init<std::vector<std::shared_ptr<Graph>>, const std::vector<size_t>&,
                    const std::vector<std::optional<sparkgap::Tensor>>&, const std::vector<int64_t>&>(),
           "parts"_a, "long_parts"_a = std::vector<size_t>(), "selectors"_a = nb::list(), "choices"_a = std::vector<int64_t>())
      .def("replay", &Program::replay, "Run it on this thread; the GIL is released meanwhile.")
      .def("__len__", &Program::size);

  nb::class_<Launch>(m, "Launch", "A program that was given to a stream.")
      .def_prop_ro("done", &Launch::done)
      .def_prop_ro("error", &Launch::error)
      .def("wait", &Launch::wait, "timeout_s"_a)
      .def_prop_ro("run", &Launch::run);

  nb::class_<Stream>(m, "Stream", "Runs programs in order on a thread of its own.")
      .def(nb::init<>())
      .def("launch", &Stream::launch, "program"_a)
      .def("reset", &Stream::reset, "timeout_s"_a)
      .def("stop", &Stream::stop);

  nb::class_<Executor>(m, "Executor", "Runs or records the CPU device's operations.")
      .def(nb::init<int, const std::string&>(), "threads"_a, "variant"_a = "")
      .def_prop_ro("threads", &Executor::threads)
      .def_prop_ro("variant", &Executor::variant)
      .def_prop_ro("capturing", &Executor::capturing)
      .def_prop_ro("captures", &Executor::captures)
      .def("begin_capture", &Executor::begin_capture, "graph"_a)
      .def("end_capture", &Executor::end_capture)
      .def("pack_linear", &Executor::pack_linear, "weight"_a, "bias"_a.none(), "form"_a)
      .def("blank_weight", &Executor::blank_weight, "out_features"_a, "in_features"_a, "form"_a, "bias"_a, "input_scale"_a)
      .def("linear", &Executor::linear, "x"_a, "weight"_a, "out"_a, "slots"_a.none() = nb::none(),
           "multipliers"_a.none() = nb::none())
      .def("quantize_rows", &Executor::quantize_rows, "x"_a, "quantized"_a, "scales"_a,
           "fixed_scale"_a = 0.0f)
      .def("rms_norm", &Executor::rms_norm, "x"_a, "weight"_a, "eps"_a, "out"_a)
      .def("add_rms_norm", &Executor::add_rms_norm, "x"_a, "residual"_a, "weight"_a, "eps"_a, "out"_a, "sum"_a)
      .def("rotary", &Executor::rotary, "x"_a, "norm"_a.none(), "eps"_a, "positions"_a, "cos"_a, "sin"_a, "out"_a)
      .def("norm_linear", &Executor::norm_linear, "x"_a, "residual"_a.none(), "norm"_a, "eps"_a, "weight"_a, "out"_a,
           "sum"_a.none())
      .def("silu_linear", &Executor::silu_linear, "gate_up"_a, "weight"_a, "out"_a)
      .def("rotary_write", &Executor::rotary_write, "qkv"_a, "query_norm"_a.none(), "key_norm"_a.none(), "eps"_a, "positions"_a,
           "cos"_a, "sin"_a, "cache_keys"_a, "cache_values"_a, "slots"_a, "queries"_a)
      .def("kv_write", &Executor::kv_write, "keys"_a, "values"_a, "cache_keys"_a, "cache_values"_a, "slots"_a)
      .def("paged_attention", &Executor::paged_attention, "queries"_a, "cache_keys"_a, "cache_values"_a, "positions"_a,
           "row_starts"_a, "block_tables"_a, "max_rows"_a, "max_length"_a, "scale"_a, "window"_a, "out"_a,
           "following"_a = std::vector<std::shared_ptr<const PackedWeight>>())
      .def("block_attention", &Executor::block_attention, "queries"_a, "keys"_a, "values"_a, "cache_keys"_a, "cache_values"_a,
           "context_lengths"_a, "block_tables"_a, "scale"_a, "window"_a, "causal"_a, "out"_a)
      .def("silu_mul", &Executor::silu_mul, "gate_up"_a, "out"_a)
      .def("embed", &Executor::embed, "token_ids"_a, "table"_a, "out"_a)
      .def("argmax", &Executor::argmax, "x"_a, "out"_a)
      .def("convert", &Executor::convert, "x"_a, "out"_a)
      .def("draft_blocks", &Executor::draft_blocks, "anchors"_a, "context_lengths"_a, "block_rows"_a, "mask_token_id"_a,
           "token_ids"_a, "positions"_a)
      .def("zero", &Executor::zero, "out"_a)
      .def("gated_head", &Executor::gated_head, "projected"_a, "embedded"_a, "latent"_a)
      .def("recurrent_head", &Executor::recurrent_head, "projected"_a, "state"_a, "latent"_a, "next_state"_a)
      .def("confidence", &Executor::confidence, "hidden"_a, "embedded"_a.none(), "weight"_a, "bias"_a, "out"_a)
      .def("add_logits", &Executor::add_logits, "base"_a, "bias"_a, "out"_a)
      .def("draft_pick", &Executor::draft_pick, "base"_a, "bias"_a.none(), "target_ids"_a.none(), "token_ids"_a, "scores"_a)
      .def("markov_chain", &Executor::markov_chain, "base"_a, "hidden"_a, "anchors"_a, "lead_rows"_a, "table"_a, "weight"_a,
           "target_ids"_a.none(), "confidence_weights"_a.none(), "confidence_biases"_a.none(), "token_ids"_a, "scores"_a,
           "confidences"_a.none())
      .def("draw_tokens", &Executor::draw_tokens, "logits"_a, "temperatures"_a, "log_min_p"_a, "top_k"_a, "top_p"_a, "seeds"_a,
           "positions"_a, "token_ids"_a, "scores"_a)
      .def("begin_round", &Executor::begin_round, "sources"_a, "staged_anchors"_a, "staged_positions"_a, "state_anchors"_a,
           "state_positions"_a, "anchors"_a, "positions"_a)
      .def("verify_rows", &Executor::verify_rows, "anchors"_a, "positions"_a, "draft_ids"_a.none(), "block_tables"_a,
           "num_blocks"_a, "block_size"_a, "max_length"_a, "token_ids"_a, "row_positions"_a, "slots"_a)
      .def("step_rows", &Executor::step_rows, "context_lengths"_a, "block_tables"_a, "block_size"_a, "max_length"_a,
           "sources"_a, "positions"_a, "slots"_a)
      .def("settle_round", &Executor::settle_round, "picks"_a, "scores"_a, "draft_ids"_a.none(), "draft_scores"_a.none(),
           "runs"_a.none(), "positions"_a, "row_positions"_a, "slots"_a, "context_length"_a, "context_positions"_a.none(),
           "context_slots"_a.none(), "next_anchors"_a, "next_positions"_a, "results"_a)
      .def("look_up", &Executor::look_up, "texts"_a, "text_rows"_a, "positions"_a, "shortest"_a, "longest"_a, "drafts"_a,
           "runs"_a, "wants_draft"_a)
      .def("fill_drafts", &Executor::fill_drafts, "proposed"_a, "runs"_a, "drafts"_a)
      .def("choose_length", &Executor::choose_length, "confidences"_a, "runs"_a.none(), "num_blocks"_a, "positions"_a, "lengths"_a,
           "costs"_a, "growth"_a, "draft_cost"_a, "wants_draft"_a.none(), "chosen"_a)
      .def("remember", &Executor::remember, "texts"_a, "text_rows"_a, "positions"_a, "results"_a)
      .def("hand_off", &Executor::hand_off, "next_anchors"_a, "next_positions"_a, "state_anchors"_a, "state_positions"_a)
      .def("empty", &Executor::empty, "shape"_a, "dtype"_a);

  // The last registered is called first: streams use the pool.
  nb::module_::import_("atexit").attr("register")(m.attr("shutdown_pool"));
  nb::module_::import_("atexit").attr("register")(m.attr("stop_streams"));
  // A daemon thread that is left in native code keeps what it uses, see `GilRelease`, and a child of a fork what its
  // parent's streams do.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([process = getpid()] {
    const int threads = nb::cast<int>(nb::module_::import_("threading").attr("active_count")());
    if (process != getpid() || threads > 1) nb::set_leak_warnings(false);
  }));
}
