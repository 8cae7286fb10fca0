// AES-256-GCM (NIST SP 800-38D) by libcrypto, which is loaded when it is first needed: nothing links against it.
//
// A text is identified by its counter, which is the nonce under the key of its direction. Two texts with one counter
// would reveal both, so counters only grow.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "netstack/dynamic.h"

namespace lamina {

constexpr std::uint64_t kKeyBytes = 32;
constexpr std::uint64_t kCodeBytes = 16;

// What is used of OpenSSL 1.1.1 or newer, whose types are opaque here.
struct Crypto {
  DynamicLibrary file = open();
  void* (*context_new)() = file.find("EVP_CIPHER_CTX_new");
  void (*context_free)(void*) = file.find("EVP_CIPHER_CTX_free");
  const void* (*aes_256_gcm)() = file.find("EVP_aes_256_gcm");
  int (*init)(void*, const void* cipher, void* engine, const std::uint8_t* key, const std::uint8_t* nonce,
              int seals) = file.find("EVP_CipherInit_ex");
  int (*update)(void*, std::uint8_t* to, int* count, const std::uint8_t* from,
                int bytes) = file.find("EVP_CipherUpdate");
  int (*final)(void*, std::uint8_t* to, int* count) = file.find("EVP_CipherFinal_ex");
  int (*control)(void*, int what, int number, void* data) = file.find("EVP_CIPHER_CTX_ctrl");
  char fault[256];  // why it cannot be used; empty: it can

  // Of this process. LAMINA_LIBCRYPTO names another file.
  static const Crypto& get() {
    static const Crypto crypto;
    return crypto;
  }

 private:
  Crypto() { file.explain(fault, "it is not OpenSSL's"); }
  static DynamicLibrary open() {
    const char* const named = std::getenv("LAMINA_LIBCRYPTO");
    if (named && *named) return {named};
    return {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"};
  }
};

// One direction of one session, on one side.
class Cipher {
 public:
  Cipher() = default;
  Cipher(const std::uint8_t key[kKeyBytes], bool seals) : seals_(seals), crypto_(&Crypto::get()) {
    context_ = crypto_->fault[0] ? nullptr : crypto_->context_new();
    sound_ = context_ && crypto_->init(context_, crypto_->aes_256_gcm(), nullptr, key, nullptr, seals);
  }
  Cipher(Cipher&& other) noexcept { *this = std::move(other); }
  Cipher& operator=(Cipher&& other) noexcept {
    std::swap(seals_, other.seals_);
    std::swap(sound_, other.sound_);
    std::swap(crypto_, other.crypto_);
    std::swap(context_, other.context_);
    return *this;
  }
  ~Cipher() {
    if (context_) crypto_->context_free(context_);
  }
  bool sound() const { return sound_; }  // so far

  void begin(std::uint64_t counter) {
    std::uint8_t nonce[12] = {};
    for (int i = 0; i < 8; ++i) nonce[11 - i] = std::uint8_t(counter >> 8 * i);
    sound_ = sound_ && crypto_->init(context_, nullptr, nullptr, nullptr, nonce, seals_);
  }

  // Process the next bytes of the text; `to` may be `from`. If that fails, `to` becomes zeros, so that no plain text is
  // left in a buffer to send.
  void pass(const std::uint8_t* from, std::uint8_t* to, std::uint64_t bytes) {
    while (bytes) {
      const int part = int(std::min(bytes, std::uint64_t{1} << 30));
      int done = 0;
      sound_ = sound_ && crypto_->update(context_, to, &done, from, part) && done == part;
      if (!sound_) std::fill(to, to + part, std::uint8_t{0});
      from += part;
      to += part;
      bytes -= std::uint64_t(part);
    }
  }

  // The end of a text that is sealed: its code.
  void seal(std::uint8_t code[kCodeBytes]) {
    int none = 0;
    sound_ = sound_ && crypto_->final(context_, code, &none) && crypto_->control(context_, kGetCode, kCodeBytes, code);
  }

  // The end of a text that is opened: whether this is its code. Compared by libcrypto, in a time that does not depend on
  // the bytes.
  bool open(const std::uint8_t code[kCodeBytes]) {
    std::uint8_t copy[kCodeBytes];
    std::copy(code, code + kCodeBytes, copy);
    int none = 0;
    sound_ = sound_ && crypto_->control(context_, kSetCode, kCodeBytes, copy) && crypto_->final(context_, copy, &none);
    return sound_;
  }

 private:
  static constexpr int kGetCode = 0x10, kSetCode = 0x11;  // EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG

  int seals_ = 0;
  bool sound_ = false;
  const Crypto* crypto_ = nullptr;
  void* context_ = nullptr;
};

}  // namespace lamina
