// A compiled layer's calls without Python: checks, memory, the two libraries, and PyTorch's autograd around them.
//
// Dimension legend: B batch, S query position, E embedding.
//
// An argument of a library is a base plus an offset. Bases are 8-byte values numbered as below (P parameters, N
// probabilities); offsets depend on B and S and come from Python once for each pair, in a plan.
//
//     0  nothing (sizes by value: the offset is the size)      3     input x [B, S, E]          7         parameters, P
//     1  the block of kept tensors                             4     output y [B, S, E]         7+P       probabilities, N
//     2  the block of temporaries                              5, 6  mask [B, S], (seed, offset) [2]
//     backward only: 7+P+N gradient of y, then the gradient of x, then the gradients of the parameters, P
//
// An argument that holds several parameters, one after the other, has the base of the first: a pack. Parameters that do
// not lie like that are copied for the time of a call.
//
// Only headers that need no Python are included: a machine may lack Python's.

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>
#include <vector>

namespace stepdown {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Packs = std::vector<std::vector<int64_t>>;  // the numbers of their parameters

constexpr int64_t KEPT = 1, WORKSPACE = 2, TENSORS = 3, MASK = 5, PARAMETERS = 7;
constexpr int64_t ALIGNMENT = 64;
constexpr size_t MOST_PLANS = 512;
constexpr int64_t SCRATCH = 1 << 18;  // bytes of scratch memory that every thread keeps

int64_t aligned(int64_t size) { return (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

int64_t address(const Tensor& tensor) { return reinterpret_cast<int64_t>(tensor.const_data_ptr()); }

int64_t writable_address(const Tensor& tensor) { return reinterpret_cast<int64_t>(tensor.mutable_data_ptr()); }

// Lends large blocks of memory; see memory.py. What is lent comes home in a deleter, which may run on any thread.
class BlockPool : public torch::CustomClassHolder {
 public:
    explicit BlockPool(int64_t pooled) : pooled_(pooled) {}

    // `size` rounded up to a quarter of a power of two, so that calls of similar shapes share blocks.
    int64_t rounded(int64_t size) const {
        const int length = std::bit_width(static_cast<uint64_t>(size));
        const int64_t step = length > 3 ? int64_t{1} << (length - 3) : 1;
        return (size + step - 1) / step * step;
    }

    // Memory of at least `size` bytes that is lent again when the pointer is destroyed.
    c10::DataPtr lend(int64_t size) {
        if (size < pooled_) {
            return c10::GetCPUAllocator()->allocate(size);
        }
        auto loan = std::make_unique<Loan>(Loan{intrusive_from_this(), block(rounded(size))});
        void* data = loan->block.memory.get();
        return c10::DataPtr(data, loan.release(), &BlockPool::come_home, c10::DeviceType::CPU);
    }

    // A tensor of `size` bytes of any content, 64-byte aligned.
    Tensor take(int64_t size) {
        if (size < pooled_) {
            return at::detail::empty_cpu({size}, at::kByte);
        }
        auto storage = c10::make_intrusive<c10::StorageImpl>(
            c10::StorageImpl::use_byte_size_t(), size, lend(size), /*allocator=*/nullptr, /*resizable=*/false);
        auto tensor = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU), caffe2::TypeMeta::Make<uint8_t>());
        tensor.unsafeGetTensorImpl()->set_sizes_contiguous({size});
        return tensor;
    }

    int64_t idle_bytes() {
        std::lock_guard lock(mutex_);
        return idle_bytes_;
    }

    // Frees all blocks that are not lent.
    void release() {
        std::lock_guard lock(mutex_);
        idle_.clear();
        idle_bytes_ = 0;
        peak_ = lent_;
    }

 private:
    struct Block {
        int64_t size;
        c10::DataPtr memory;
    };
    struct Loan {
        c10::intrusive_ptr<BlockPool> pool;
        Block block;
    };

    c10::intrusive_ptr<BlockPool> intrusive_from_this() {
        return c10::intrusive_ptr<BlockPool>::unsafe_reclaim_from_nonowning(this);
    }

    Block block(int64_t size) {
        std::lock_guard lock(mutex_);
        const auto found = idle_.lower_bound(size);
        if (found != idle_.end() && found->first <= 2 * size) {
            Block block{found->first, std::move(found->second)};
            idle_.erase(found);
            idle_bytes_ -= block.size;
            lent_ += block.size;
            peak_ = std::max(peak_, lent_);
            return block;
        }
        const int64_t peak = std::max(peak_, lent_ + size);
        while (!idle_.empty() && lent_ + size + idle_bytes_ > peak) {
            idle_bytes_ -= idle_.begin()->first;
            idle_.erase(idle_.begin());
        }
        Block block{size, c10::GetCPUAllocator()->allocate(size)};
        lent_ += size;
        peak_ = std::max(peak_, lent_);
        return block;
    }

    static void come_home(void* context) {
        const std::unique_ptr<Loan> loan(static_cast<Loan*>(context));
        BlockPool& pool = *loan->pool;
        std::lock_guard lock(pool.mutex_);
        pool.lent_ -= loan->block.size;
        pool.idle_bytes_ += loan->block.size;
        pool.idle_.emplace(loan->block.size, std::move(loan->block.memory));
    }

    const int64_t pooled_;
    std::mutex mutex_;
    std::multimap<int64_t, c10::DataPtr> idle_;
    int64_t lent_ = 0, idle_bytes_ = 0, peak_ = 0;
};

// Memory for the time of one call; small ones are the same for every call of a thread.
class Scratch {
 public:
    Scratch(BlockPool& pool, int64_t size) {
        if (size > SCRATCH) {
            lent_ = pool.lend(size);
            data_ = lent_.get();
            return;
        }
        static thread_local const c10::DataPtr own = c10::GetCPUAllocator()->allocate(SCRATCH);
        data_ = own.get();
    }

    int64_t address() const { return reinterpret_cast<int64_t>(data_); }

 private:
    c10::DataPtr lent_;
    void* data_;
};

// One library: its program takes the values of its arguments as an array.
struct Program {
    void (*call)(void*, const int64_t*);
    void* handle;
    void (*set_threads)(int);    // may be null
    std::vector<int64_t> bases;  // of every argument

    void run(c10::ArrayRef<int64_t> base, const std::vector<int64_t>& offsets) const {
        c10::SmallVector<int64_t, 96> values(bases.size());
        for (size_t i = 0; i < bases.size(); i++) {
            values[i] = base[bases[i]] + offsets[i];
        }
        if (set_threads != nullptr) {
            set_threads(at::get_num_threads());
        }
        call(handle, values.data());
    }
};

// What calls at one B and S need; sizes in bytes, an offset for every argument.
struct Plan {
    int64_t kept_bytes;
    int64_t forward_bytes;
    std::vector<int64_t> forward;
    int64_t backward_bytes;
    std::vector<int64_t> backward;
    Tensor full_mask;  // [B, S], all true
};

class Layer;

// What the backward pass needs besides saved tensors.
struct Call : torch::CustomClassHolder {
    c10::intrusive_ptr<Layer> layer;
    std::shared_ptr<const Plan> plan;
    std::vector<double> probabilities;
};

struct Fixed {
    const Tensor& mask;
    const Tensor& rng;
};

struct LayerFunction : torch::autograd::Function<LayerFunction> {
    static Tensor forward(
        AutogradContext* context,
        const c10::intrusive_ptr<Call>& call,
        const Fixed& fixed,
        const Tensor& x,
        at::TensorList parameters);
    static variable_list backward(AutogradContext* context, variable_list gradients);
};

// Hands gradients through, so that their own derivatives raise an error instead of passing for constants.
struct NoSecondDerivative : torch::autograd::Function<NoSecondDerivative> {
    static variable_list forward(AutogradContext*, at::TensorList gradients) { return gradients.vec(); }

    static variable_list backward(AutogradContext*, variable_list) {
        TORCH_CHECK(
            false, "A compiled layer has no second derivatives (once_differentiable); first derivatives are accepted.");
    }
};

// The two libraries of a build as one differentiable function of tensors.
class Layer : public torch::CustomClassHolder {
 public:
    // `batch` and `seq` are promised sizes, 0 for any; `shapes` are the parameters'; a program is the addresses of its
    // function, handle and setter of threads; `saved` are the bases that backward reads again, in ascending order;
    // `packs` and `gradient_packs` are the parameters that an argument of either library holds, and a gradient.
    Layer(
        c10::intrusive_ptr<BlockPool> pool,
        at::ScalarType dtype,
        int64_t batch,
        int64_t seq,
        int64_t embed,
        std::vector<std::vector<int64_t>> shapes,
        int64_t probabilities,
        bool takes_mask,
        std::vector<int64_t> forward_program,
        std::vector<int64_t> forward_bases,
        std::vector<int64_t> backward_program,
        std::vector<int64_t> backward_bases,
        std::vector<int64_t> saved,
        Packs packs,
        Packs gradient_packs)
        : pool_(std::move(pool)),
          dtype_(dtype),
          batch_(batch),
          seq_(seq),
          embed_(embed),
          shapes_(std::move(shapes)),
          probabilities_(probabilities),
          takes_mask_(takes_mask),
          forward_(program(forward_program, std::move(forward_bases))),
          backward_(program(backward_program, std::move(backward_bases))),
          saved_(std::move(saved)),
          packs_(std::move(packs)),
          gradient_packs_(std::move(gradient_packs)) {
        const c10::InferenceMode normal(false);  // or it could not be saved for a backward pass
        no_rng_ = at::detail::empty_cpu({2}, at::kLong);
        std::fill_n(no_rng_.mutable_data_ptr<int64_t>(), 2, 0);
    }

    // The same layer with the plans it has now, for measurements: its calls do everything but the arithmetic.
    c10::intrusive_ptr<Layer> without_kernels() {
        auto copy = c10::make_intrusive<Layer>(
            pool_, dtype_, batch_, seq_, embed_, shapes_, probabilities_, takes_mask_, addresses(forward_), forward_.bases,
            addresses(backward_), backward_.bases, saved_, packs_, gradient_packs_);
        copy->forward_.call = copy->backward_.call = [](void*, const int64_t*) {};
        std::shared_lock lock(mutex_);
        copy->plans_ = plans_;
        copy->order_ = order_;
        return copy;
    }

    void add_plan(
        int64_t batch,
        int64_t seq,
        int64_t kept_bytes,
        int64_t forward_bytes,
        std::vector<int64_t> forward,
        int64_t backward_bytes,
        std::vector<int64_t> backward) {
        TORCH_CHECK(forward.size() == forward_.bases.size() && backward.size() == backward_.bases.size());
        const c10::InferenceMode normal(false);
        auto plan = std::make_shared<Plan>(
            Plan{kept_bytes, forward_bytes, std::move(forward), backward_bytes, std::move(backward), {}});
        plan->full_mask = at::detail::empty_cpu({batch, seq}, at::kBool);
        std::fill_n(plan->full_mask.mutable_data_ptr<bool>(), batch * seq, true);
        std::unique_lock lock(mutex_);
        const std::pair key(batch, seq);
        if (!plans_.insert_or_assign(key, std::move(plan)).second) {
            return;
        }
        order_.push_back(key);
        if (order_.size() > MOST_PLANS) {
            plans_.erase(order_.front());
            order_.pop_front();
        }
    }

    int64_t plans() {
        std::shared_lock lock(mutex_);
        return static_cast<int64_t>(plans_.size());
    }

    // The packs that do not lie one after the other and could: all of their tensors are leaves with memory of their own,
    // or with that of such a pack.
    std::vector<int64_t> scattered(const std::vector<Tensor>& parameters) const {
        std::vector<int64_t> found;
        for (size_t number = 0; number < packs_.size(); number++) {
            int64_t end = 0;
            bool together = true, movable = true;
            for (const int64_t i : packs_[number]) {
                const Tensor& one = parameters.at(i);
                if (!is_plain(one) || !one.unsafeGetTensorImpl()->has_storage() || !one.is_contiguous()) {
                    movable = false;
                    break;
                }
                together = together && (end == 0 || address(one) == end);
                end = address(one) + static_cast<int64_t>(one.nbytes());
                const auto size = static_cast<int64_t>(one.storage().nbytes());
                const bool own = size == bytes(i) || size == bytes(packs_[number]) || one.storage().use_count() == 1;
                movable = movable && own && one.is_leaf() && !one.is_inference() && !one.is_neg();
            }
            if (movable && !together) {
                found.push_back(static_cast<int64_t>(number));
            }
        }
        return found;
    }

    // [y], or [y, (seed, offset)] with `probabilities`, of which there are none without dropout. Empty when a tensor is
    // not what the layer was compiled for, there is no plan for its sizes, or, unless told to call `anyway`, parameters
    // are scattered: nothing was done then.
    std::vector<Tensor> call(
        const Tensor& x,
        const std::optional<Tensor>& attention_mask,
        std::vector<Tensor> parameters,
        std::vector<double> probabilities,
        bool anyway) {
        if (!is_plain(x) || x.dim() != 3 || x.size(2) != embed_ || parameters.size() != shapes_.size()) {
            return {};
        }
        const int64_t batch = x.size(0), seq = x.size(1);
        if ((batch_ != 0 && batch != batch_) || (seq_ != 0 && seq != seq_)) {
            return {};
        }
        for (size_t i = 0; i < parameters.size(); i++) {
            if (!is_plain(parameters[i]) || parameters[i].sizes() != shapes_[i]) {
                return {};
            }
        }
        const auto plan = find(batch, seq);
        if (plan == nullptr || (attention_mask && !is_mask(*attention_mask, batch, seq))) {
            return {};
        }
        if (!anyway && !packs_.empty() && !scattered(parameters).empty()) {
            return {};
        }
        const Tensor mask = !attention_mask                                  ? plan->full_mask
                            : attention_mask->scalar_type() == at::kBool ? attention_mask->contiguous()
                                                                             : at::ne(*attention_mask, 0);
        const Tensor input = readable(x);
        bool differentiable = input.requires_grad();
        for (Tensor& parameter : parameters) {
            parameter = readable(parameter);
            differentiable |= parameter.requires_grad();
        }
        // Drawn after all checks: a refused call leaves the generator alone.
        const bool draws = !probabilities.empty();
        const Tensor rng = draws ? Tensor(at::detail::empty_cpu({2}, at::kLong)).random_() : no_rng_;
        probabilities.resize(probabilities_);
        Tensor output;
        if (differentiable && at::GradMode::is_enabled()) {
            auto call = c10::make_intrusive<Call>();
            call->layer = c10::intrusive_ptr<Layer>::unsafe_reclaim_from_nonowning(this);
            call->plan = plan;
            call->probabilities = std::move(probabilities);
            output = LayerFunction::apply(call, Fixed{mask, rng}, input, at::TensorList(parameters));
        } else {
            const Scratch scratch(*pool_, aligned(plan->forward_bytes) + plan->kept_bytes);
            const int64_t kept = scratch.address() + aligned(plan->forward_bytes);
            output = run_forward(*plan, probabilities, input, {mask, rng}, parameters, kept, scratch.address());
        }
        return draws ? std::vector<Tensor>{output, rng} : std::vector<Tensor>{output};
    }

 private:
    friend struct LayerFunction;

    static Program program(const std::vector<int64_t>& addresses, std::vector<int64_t> bases) {
        return {
            reinterpret_cast<void (*)(void*, const int64_t*)>(addresses.at(0)),
            reinterpret_cast<void*>(addresses.at(1)),
            reinterpret_cast<void (*)(int)>(addresses.at(2)),
            std::move(bases)};
    }

    static std::vector<int64_t> addresses(const Program& program) {
        return {
            reinterpret_cast<int64_t>(program.call),
            reinterpret_cast<int64_t>(program.handle),
            reinterpret_cast<int64_t>(program.set_threads)};
    }

    bool is_plain(const Tensor& tensor) const {
        return tensor.scalar_type() == dtype_ && tensor.is_cpu() && tensor.layout() == at::kStrided;
    }

    bool is_mask(const Tensor& mask, int64_t batch, int64_t seq) const {
        return takes_mask_ && mask.is_cpu() && mask.layout() == at::kStrided &&
               c10::isIntegralType(mask.scalar_type(), /*includeBool=*/true) && mask.dim() == 2 && mask.size(0) == batch &&
               mask.size(1) == seq;
    }

    // As the libraries read it: a copy where it is not contiguous, which autograd knows of.
    static Tensor readable(const Tensor& tensor) {
        return tensor.is_neg() ? tensor.resolve_neg().contiguous() : tensor.contiguous();
    }

    std::shared_ptr<const Plan> find(int64_t batch, int64_t seq) {
        std::shared_lock lock(mutex_);
        const auto found = plans_.find({batch, seq});
        return found == plans_.end() ? nullptr : found->second;
    }

    Tensor run_forward(
        const Plan& plan,
        const std::vector<double>& probabilities,
        const Tensor& x,
        const Fixed& fixed,
        at::TensorList parameters,
        int64_t kept,
        int64_t workspace) const {
        Tensor output = at::detail::empty_cpu(x.sizes(), dtype_);
        c10::SmallVector<int64_t, 64> base{
            0, kept, workspace, address(x), writable_address(output), address(fixed.mask), address(fixed.rng)};
        for (const Tensor& parameter : parameters) {
            base.push_back(address(parameter));
        }
        for (const double probability : probabilities) {
            base.push_back(std::bit_cast<int64_t>(probability));
        }
        const auto copies = gather(base.data());
        forward_.run(base, plan.forward);
        return output;
    }

    int64_t bytes(int64_t parameter) const {
        return static_cast<int64_t>(c10::elementSize(dtype_)) * c10::multiply_integers(shapes_[parameter]);
    }

    int64_t bytes(const std::vector<int64_t>& pack) const {
        int64_t total = 0;
        for (const int64_t i : pack) {
            total += bytes(i);
        }
        return total;
    }

    // Lets the base of every pack that `base` has point to its parameters one after the other; returns the copies.
    std::vector<c10::DataPtr> gather(int64_t* base) const {
        std::vector<c10::DataPtr> copies;
        for (const auto& pack : packs_) {
            const int64_t* own = base + PARAMETERS;
            int64_t end = own[pack[0]];
            bool together = true, present = true;
            for (const int64_t i : pack) {
                present = present && own[i] != 0;
                together = together && own[i] == end;
                end = own[i] + bytes(i);
            }
            if (together || !present) {
                continue;
            }
            copies.push_back(pool_->lend(bytes(pack)));
            char* target = static_cast<char*>(copies.back().get());
            for (const int64_t i : pack) {
                std::memcpy(target, reinterpret_cast<const void*>(own[i]), bytes(i));
                target += bytes(i);
            }
            base[PARAMETERS + pack[0]] = reinterpret_cast<int64_t>(copies.back().get());
        }
        return copies;
    }

    // The gradients of x and of every parameter; undefined where they are not `wanted`.
    variable_list run_backward(
        const Call& call, const Tensor& gradient, const variable_list& saved, const std::vector<bool>& wanted) const {
        const auto size = [&](size_t i) {
            return i == 0 ? static_cast<int64_t>(gradient.nbytes()) : bytes(static_cast<int64_t>(i) - 1);
        };
        variable_list gradients(wanted.size());
        pack_gradients(gradients, wanted);
        int64_t unwanted = aligned(call.plan->backward_bytes), scratch_bytes = unwanted;
        for (size_t i = 0; i < wanted.size(); i++) {
            scratch_bytes += wanted[i] || gradients[i].defined() ? 0 : aligned(size(i));
        }
        for (const auto& pack : gradient_packs_) {
            scratch_bytes += aligned(bytes(pack));
        }
        const Scratch scratch(*pool_, scratch_bytes);
        const int64_t tensors = PARAMETERS + static_cast<int64_t>(shapes_.size());
        c10::SmallVector<int64_t, 96> base(tensors, 0);
        base[KEPT] = address(saved[0]);
        base[WORKSPACE] = scratch.address();
        for (size_t i = 0; i < saved_.size(); i++) {
            base[saved_[i]] = address(saved[i + 1]);
        }
        for (const double probability : call.probabilities) {
            base.push_back(std::bit_cast<int64_t>(probability));
        }
        base.push_back(address(gradient));
        const size_t first = base.size();
        for (size_t i = 0; i < wanted.size(); i++) {
            if (wanted[i] && !gradients[i].defined()) {
                gradients[i] = at::detail::empty_cpu(i == 0 ? gradient.sizes() : at::IntArrayRef(shapes_[i - 1]), dtype_);
            }
            if (gradients[i].defined()) {
                base.push_back(writable_address(gradients[i]));
            } else {
                base.push_back(scratch.address() + unwanted);
                unwanted += aligned(size(i));
            }
        }
        for (const auto& pack : gradient_packs_) {
            if (!gradients[pack[0] + 1].defined()) {
                base[first + pack[0] + 1] = scratch.address() + unwanted;
                unwanted += aligned(bytes(pack));
            }
        }
        const auto copies = gather(base.data());
        backward_.run(base, call.plan->backward);
        for (size_t i = 0; i < wanted.size(); i++) {
            if (!wanted[i]) {
                gradients[i].reset();
            }
        }
        return gradients;
    }

    // Makes the gradients of each pack of which one is wanted, one after the other in one block of memory.
    void pack_gradients(variable_list& gradients, const std::vector<bool>& wanted) const {
        for (const auto& pack : gradient_packs_) {
            if (std::none_of(pack.begin(), pack.end(), [&](int64_t i) { return wanted[i + 1]; })) {
                continue;
            }
            const Tensor all = at::detail::empty_cpu({bytes(pack)}, at::kByte);
            int64_t offset = 0;
            for (const int64_t i : pack) {
                gradients[i + 1] = at::detail::make_tensor<c10::TensorImpl>(
                    c10::Storage(all.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype_));
                auto* tensor = gradients[i + 1].unsafeGetTensorImpl();
                tensor->set_sizes_contiguous(shapes_[i]);
                tensor->set_storage_offset(offset / static_cast<int64_t>(c10::elementSize(dtype_)));
                offset += bytes(i);
            }
        }
    }

    const c10::intrusive_ptr<BlockPool> pool_;
    const at::ScalarType dtype_;
    const int64_t batch_, seq_, embed_;
    const std::vector<std::vector<int64_t>> shapes_;
    const int64_t probabilities_;
    const bool takes_mask_;
    Program forward_, backward_;
    const std::vector<int64_t> saved_;
    const Packs packs_, gradient_packs_;
    Tensor no_rng_;
    std::shared_mutex mutex_;
    std::map<std::pair<int64_t, int64_t>, std::shared_ptr<const Plan>> plans_;
    std::deque<std::pair<int64_t, int64_t>> order_;  // of the plans, the oldest first
};

// What the backward library reads is saved the way autograd knows: changes in place are noticed, hooks on saved tensors
// see everything, and it is freed with the graph.
Tensor LayerFunction::forward(
    AutogradContext* context,
    const c10::intrusive_ptr<Call>& call,
    const Fixed& fixed,
    const Tensor& x,
    at::TensorList parameters) {
    const Layer& layer = *call->layer;
    const Plan& plan = *call->plan;
    const Tensor kept = layer.pool_->take(plan.kept_bytes);
    Tensor output;
    {
        const Scratch workspace(*layer.pool_, plan.forward_bytes);
        output = layer.run_forward(
            plan, call->probabilities, x, fixed, parameters, writable_address(kept), workspace.address());
    }
    variable_list saved{kept};
    saved.reserve(layer.saved_.size() + 1);
    const std::array<const Tensor*, 4> own{&x, &output, &fixed.mask, &fixed.rng};
    for (const int64_t base : layer.saved_) {
        saved.push_back(base < PARAMETERS ? *own.at(base - TENSORS) : parameters[base - PARAMETERS]);
    }
    context->save_for_backward(std::move(saved));
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return output;
}

variable_list LayerFunction::backward(AutogradContext* context, variable_list gradients) {
    const auto holder = context->saved_data["call"].toCapsule();
    const Call& call = static_cast<const Call&>(*holder);
    const Layer& layer = *call.layer;
    const variable_list saved = context->get_saved_variables();
    const Tensor& given = gradients.at(0);
    TORCH_CHECK(
        layer.is_plain(given) && given.unsafeGetTensorImpl()->has_storage(),
        "a gradient that is not a dense tensor on the CPU of the layer's dtype was given to a compiled layer; accepted "
        "are those, one at a time.");
    const Tensor gradient = Layer::readable(given);
    std::vector<bool> wanted(layer.shapes_.size() + 1);
    for (size_t i = 0; i < wanted.size(); i++) {
        wanted[i] = context->needs_input_grad(i);
    }
    variable_list found = layer.run_backward(call, gradient, saved, wanted);
    if (at::GradMode::is_enabled()) {  // create_graph=True
        variable_list present;
        for (const Tensor& one : found) {
            if (one.defined()) {
                present.push_back(one.detach().requires_grad_());
            }
        }
        present = NoSecondDerivative::apply(at::TensorList(present));
        auto next = present.begin();
        for (Tensor& one : found) {
            if (one.defined()) {
                one = *next++;
            }
        }
    }
    found.insert(found.begin(), 2, Tensor());  // of the two arguments that are not tensors
    return found;
}

}  // namespace stepdown

TORCH_LIBRARY(stepdown, library) {
    using stepdown::BlockPool;
    using stepdown::Layer;
    using Integers = std::vector<int64_t>;
    library.class_<BlockPool>("BlockPool")
        .def(torch::init<int64_t>())
        .def("rounded", &BlockPool::rounded)
        .def("take", &BlockPool::take)
        .def("idle_bytes", &BlockPool::idle_bytes)
        .def("release", &BlockPool::release);
    library.class_<Layer>("Layer")
        .def(torch::init<
             c10::intrusive_ptr<BlockPool>, at::ScalarType, int64_t, int64_t, int64_t, std::vector<Integers>, int64_t, bool,
             Integers, Integers, Integers, Integers, Integers, std::vector<Integers>, std::vector<Integers>>())
        .def("without_kernels", &Layer::without_kernels)
        .def("add_plan", &Layer::add_plan)
        .def("plans", &Layer::plans)
        .def("scattered", &Layer::scattered)
        .def("call", &Layer::call);
}
