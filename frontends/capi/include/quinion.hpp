/* Quinion for C++17: quinion.h with destructors and exceptions, in a header of its own.
 *
 *   quinion::cache cache(1 << 30);
 *   quinion::file file = cache.open("table");
 *   std::size_t bytes = file.read(buffer, sizeof buffer, 0);
 *
 * Each class owns one handle, can be moved and not copied, and gives the handle back at its end. A failure is a
 * quinion::error, whose code() is the errno and whose what() is the message. A destructor has no one to tell of a
 * failure: call close() where that matters, as after writes. get() is the handle, for functions without a method. */
#ifndef QUINION_HPP
#define QUINION_HPP

#include "quinion.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <system_error>
#include <utility>

namespace quinion {

/* What a call could not do, and why. */
class error : public std::system_error {
public:
    error(int number, std::string message)
        : std::system_error(number, std::generic_category()), message_(std::move(message)) {}
    const char *what() const noexcept override { return message_.c_str(); }

private:
    std::string message_;
};

/* A count, or an exception for a negative errno. */
inline std::int64_t check(std::int64_t answer) {
    if (answer < 0) throw error(static_cast<int>(-answer), qn_error_message());
    return answer;
}

/* A handle, and how it is given back. */
template <typename T, int (*Close)(T *)> class handle {
public:
    handle() noexcept = default;
    explicit handle(T *raw) noexcept : raw_(raw) {}
    handle(handle &&other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
    handle &operator=(handle &&other) noexcept {
        if (this != &other) {
            reset();
            raw_ = std::exchange(other.raw_, nullptr);
        }
        return *this;
    }
    handle(const handle &) = delete;
    handle &operator=(const handle &) = delete;
    ~handle() { reset(); }

    T *get() const noexcept { return raw_; }
    explicit operator bool() const noexcept { return raw_ != nullptr; }
    /* Gives it back, and says what went wrong. */
    void close() {
        if (T *raw = std::exchange(raw_, nullptr)) check(Close(raw));
    }

private:
    void reset() noexcept {
        if (T *raw = std::exchange(raw_, nullptr)) Close(raw);
    }
    T *raw_ = nullptr;
};

/* Bytes that stay where they are: a range of qn_run. */
class pin : public handle<qn_pin, qn_unpin> {
public:
    using handle::handle;
    const qn_run *begin() const { return runs().first; }
    const qn_run *end() const { return runs().first + runs().second; }
    std::size_t size() const { return static_cast<std::size_t>(check(qn_pin_length(get()))); }
    /* All of them in one piece; throws EOPNOTSUPP where that takes a copy. */
    const void *mapped() const {
        const void *data;
        check(qn_pin_mapped(get(), &data));
        return data;
    }

private:
    std::pair<const qn_run *, std::size_t> runs() const {
        std::pair<const qn_run *, std::size_t> runs;
        check(qn_pin_runs(get(), &runs.first, &runs.second));
        return runs;
    }
};

/* A file of whatever kind. */
class file : public handle<qn_file, qn_close> {
public:
    using handle::handle;
    std::size_t read(void *buffer, std::size_t length, std::uint64_t offset) const {
        return static_cast<std::size_t>(check(qn_pread(get(), buffer, length, offset)));
    }
    std::size_t write(const void *bytes, std::size_t length, std::uint64_t offset) const {
        return static_cast<std::size_t>(check(qn_pwrite(get(), bytes, length, offset)));
    }
    std::uint64_t append(const void *bytes, std::size_t length) const {
        return static_cast<std::uint64_t>(check(qn_append(get(), bytes, length)));
    }
    void sync(std::uint32_t kind = QN_SYNC_ALL) const { check(qn_sync(get(), kind)); }
    void truncate(std::uint64_t length) const { check(qn_truncate(get(), length)); }
    std::uint64_t size() const { return static_cast<std::uint64_t>(check(qn_length(get()))); }
    pin pinned(std::uint64_t offset, std::size_t length) const {
        qn_pin *raw;
        check(qn_pin_range(get(), offset, length, &raw));
        return pin(raw);
    }
};

/* A share of a cache. */
class pool : public handle<qn_pool, qn_pool_close> {
public:
    using handle::handle;
};

/* A cache of this process. */
class cache : public handle<qn_cache, qn_cache_close> {
public:
    /* With the default options but for its memory, in bytes. */
    explicit cache(std::uint64_t memory) : cache(with_memory(memory)) {}
    explicit cache(const qn_cache_options &options) : handle(opened(options)) {}
    file open(const std::string &path) const { return open(path, nullptr); }
    file open(const std::string &path, const qn_open_options &options) const { return open(path, &options); }
    file open(const qn_backend &backend) const {
        qn_file *raw;
        check(qn_open_backend(get(), &backend, nullptr, &raw));
        return file(raw);
    }
    file memory_file(const qn_memory_file_options &options) const {
        qn_file *raw;
        check(qn_memory_file(get(), &options, &raw));
        return file(raw);
    }
    pool add_pool(const std::string &name, const qn_pool_options &options) const {
        qn_pool *raw;
        check(qn_pool_add(get(), name.c_str(), &options, &raw));
        return pool(raw);
    }
    qn_stats stats() const {
        qn_stats stats{};
        stats.size = sizeof stats;
        check(qn_cache_stats(get(), &stats));
        return stats;
    }

private:
    static qn_cache_options with_memory(std::uint64_t memory) {
        qn_cache_options options{};
        options.size = sizeof options;
        options.memory = memory;
        return options;
    }
    static qn_cache *opened(const qn_cache_options &options) {
        qn_cache *raw;
        check(qn_cache_open(&options, &raw));
        return raw;
    }
    file open(const std::string &path, const qn_open_options *options) const {
        qn_file *raw;
        check(qn_open(get(), path.c_str(), options, &raw));
        return file(raw);
    }
};

/* A connection to a server, whose cache several processes share. */
class client : public handle<qn_client, qn_client_close> {
public:
    explicit client(const std::string &server) : handle(connected(server)) {}
    /* An object by its URL, or a local file by its path. */
    file open(const std::string &name) const {
        qn_file *raw;
        check(qn_client_open(get(), name.c_str(), &raw));
        return file(raw);
    }

private:
    static qn_client *connected(const std::string &server) {
        qn_client *raw;
        check(qn_connect(server.c_str(), nullptr, &raw));
        return raw;
    }
};

} // namespace quinion

#endif
