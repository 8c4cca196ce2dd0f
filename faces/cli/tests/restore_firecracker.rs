//! A real Firecracker, if `$FIRECRACKER_BIN` names one: it makes a snapshot of a guest of ours, and resumes it with its
//! memory served by `quinion restore`.
//!
//! ```text
//!   first    boots the guest, which fills 16 MiB and checks them for ever:  F V V V   --pause--> memory, state
//!   second   loads the state, with a page-fault server for its memory:          V V V, and never an X
//! ```
//!
//! The guest is 72 bytes in an ELF file that we write. It needs no kernel and no disk.

use quinion_testing::vmm;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use quinion_testing::vmm::{Need, kernel};

const WATCHDOG: Duration = Duration::from_secs(300);

/// Long mode, identity-mapped. Each word of its 16 MiB holds its own address.
const GUEST: [u8; 72] = [
    0x48, 0xc7, 0xc7, 0x00, 0x00, 0x00, 0x02, //          mov  rdi, 32 MiB
    0x48, 0xc7, 0xc1, 0x00, 0x00, 0x20, 0x00, //          mov  rcx, 16 MiB / 8
    0x48, 0x89, 0x3f, //                            fill: mov  [rdi], rdi
    0x48, 0x83, 0xc7, 0x08, //                            add  rdi, 8
    0x48, 0xff, 0xc9, //                                  dec  rcx
    0x75, 0xf4, //                                        jnz  fill
    0x66, 0xba, 0xf8, 0x03, //                            mov  dx, the serial port
    0xb0, b'F', //                                        mov  al, 'F'
    0xee, //                                              out  dx, al
    0x48, 0xc7, 0xc7, 0x00, 0x00, 0x00, 0x02, //    next: mov  rdi, 32 MiB
    0x48, 0xc7, 0xc1, 0x00, 0x00, 0x20, 0x00, //          mov  rcx, 16 MiB / 8
    0x48, 0x39, 0x3f, //                           check: cmp  [rdi], rdi
    0x75, 0x0e, //                                        jne  bad
    0x48, 0x83, 0xc7, 0x08, //                            add  rdi, 8
    0x48, 0xff, 0xc9, //                                  dec  rcx
    0x75, 0xf2, //                                        jnz  check
    0xb0, b'V', //                                        mov  al, 'V'
    0xee, //                                              out  dx, al
    0xeb, 0xdf, //                                        jmp  next
    0xb0, b'X', //                                   bad: mov  al, 'X'
    0xee, //                                              out  dx, al
    0xf4, //                                        stop: hlt
    0xeb, 0xfd, //                                        jmp  stop
];
const GUEST_ADDRESS: u64 = 16 << 20;

/// An ELF file with one segment.
fn elf() -> Vec<u8> {
    let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    file.extend([2u16, 62].iter().flat_map(|half| half.to_le_bytes()));
    file.extend(1u32.to_le_bytes());
    // Entry, program headers, section headers.
    file.extend([GUEST_ADDRESS, 64, 0].iter().flat_map(|word| word.to_le_bytes()));
    file.extend(0u32.to_le_bytes());
    file.extend([64u16, 56, 1, 64, 0, 0].iter().flat_map(|half| half.to_le_bytes()));
    // A segment to load: readable, writable, executable.
    file.extend([1u32, 7].iter().flat_map(|half| half.to_le_bytes()));
    let bytes = GUEST.len() as u64;
    let segment = [4096, GUEST_ADDRESS, GUEST_ADDRESS, bytes, bytes, 4096];
    file.extend(segment.iter().flat_map(|word| word.to_le_bytes()));
    file.resize(4096, 0);
    file.extend(GUEST);
    file
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Firecracker {
    api: PathBuf,
    serial: BufReader<ChildStdout>,
    _process: Killed,
}

impl Firecracker {
    fn start(binary: &OsString, api: &Path) -> Self {
        let mut command = Command::new(binary);
        command.arg("--api-sock").arg(api).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("$FIRECRACKER_BIN can be started");
        let serial = BufReader::new(child.stdout.take().unwrap());
        let began = Instant::now();
        while UnixStream::connect(api).is_err() {
            assert!(began.elapsed() < WATCHDOG, "it opens no API socket");
            std::thread::yield_now();
        }
        Self { api: api.to_owned(), serial, _process: Killed(child) }
    }

    #[track_caller]
    fn ask(&self, method: &str, path: &str, body: &str) {
        let mut stream = UnixStream::connect(&self.api).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        let bytes = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n");
        stream.write_all(format!("{head}Content-Length: {bytes}\r\n\r\n{body}").as_bytes()).unwrap();
        let mut answer = [0; 4096];
        let read = stream.read(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer[..read]).into_owned();
        assert!(answer.starts_with("HTTP/1.1 20"), "{method} {path}: {answer}");
    }

    /// Waits until the guest has checked its memory `times` times.
    fn checks(&mut self, times: usize) {
        let mut serial = self.serial.by_ref().bytes().map(|byte| byte.expect("the guest goes on"));
        let mut seen = 0;
        while seen < times {
            match serial.next() {
                Some(b'V') => seen += 1,
                Some(b'X') => panic!("the guest finds its memory wrong"),
                Some(_) => {}
                None => panic!("the guest has ended"),
            }
        }
    }
}

#[test]
fn a_real_firecracker_goes_on_from_a_snapshot_that_we_serve() {
    let test = "a_real_firecracker_goes_on_from_a_snapshot_that_we_serve";
    let Some(binary) = std::env::var_os("FIRECRACKER_BIN") else {
        return vmm::skipped(test, "$FIRECRACKER_BIN is not set");
    };
    if !vmm::has(test, &[Need::Userfault(kernel::EVENT_REMOVE), Need::Kvm]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let text = |name: &str| path(name).to_str().unwrap().to_owned();
    fs::write(path("guest"), elf()).unwrap();

    let mut first = Firecracker::start(&binary, &path("first"));
    first.ask("PUT", "/machine-config", r#"{"vcpu_count":1,"mem_size_mib":128}"#);
    first.ask("PUT", "/boot-source", &format!(r#"{{"kernel_image_path":"{}"}}"#, text("guest")));
    first.ask("PUT", "/actions", r#"{"action_type":"InstanceStart"}"#);
    first.checks(2);
    first.ask("PATCH", "/vm", r#"{"state":"Paused"}"#);
    let (state, memory) = (text("state"), text("memory"));
    let create =
        format!(r#"{{"snapshot_type":"Full","snapshot_path":"{state}","mem_file_path":"{memory}"}}"#);
    first.ask("PUT", "/snapshot/create", &create);
    drop(first);

    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion"));
    command.args(["restore", "--snapshot", &memory, "--socket", &text("faults")]).stderr(Stdio::piped());
    let mut server = Killed(command.spawn().unwrap());
    let mut said = BufReader::new(server.0.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(said.any(|line| line.contains("serving")), "the server serves");
    std::thread::spawn(move || said.for_each(|line| println!("{line}")));

    let mut second = Firecracker::start(&binary, &path("second"));
    let backend = format!(r#"{{"backend_type":"Uffd","backend_path":"{}"}}"#, text("faults"));
    let load = format!(r#"{{"snapshot_path":"{state}","mem_backend":{backend},"resume_vm":true}}"#);
    second.ask("PUT", "/snapshot/load", &load);
    second.checks(5);
}
