//! A network of our own between two brokers: a relay for UDP datagrams that loses, delays, reorders,
//! doubles and cuts them, and changes the port they come from.
//!
//! It stands in front of one listener. Every dialler gets a socket of its own towards that listener, as
//! behind an address translator.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What happens to datagrams.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Path {
    /// Of a thousand, lost.
    pub loss_per_mille: u64,
    /// Of a thousand, sent twice.
    pub doubled_per_mille: u64,
    /// Of a thousand, held back by ten more milliseconds, so that later ones overtake.
    pub late_per_mille: u64,
    /// Added to every datagram, each way.
    pub delay: Duration,
    /// Larger datagrams vanish.
    pub max_bytes: Option<usize>,
    /// Nothing gets through to the listener.
    pub cut_forth: bool,
    /// Nothing gets back to the dialler.
    pub cut_back: bool,
}

struct Shared {
    path: Mutex<Path>,
    stop: AtomicBool,
    change_ports: AtomicBool,
    relayed: AtomicU64,
    dropped: AtomicU64,
    largest_bytes: AtomicU64,
}

/// The relay; it ends when it is dropped.
pub struct UdpRelay {
    addr: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl UdpRelay {
    /// Relays to `target`. `seed` makes its choices repeatable.
    pub fn start(target: SocketAddr, seed: u64) -> Self {
        let front = socket();
        let addr = front.local_addr().expect("a bound socket");
        let shared = Arc::new(Shared {
            path: Mutex::default(),
            stop: AtomicBool::default(),
            change_ports: AtomicBool::default(),
            relayed: AtomicU64::default(),
            dropped: AtomicU64::default(),
            largest_bytes: AtomicU64::default(),
        });
        let relay = Relay {
            front,
            target,
            shared: shared.clone(),
            diallers: HashMap::new(),
            waiting: BinaryHeap::new(),
            order: 0,
            random: seed | 1,
        };
        let thread = std::thread::spawn(move || relay.run());
        Self {
            addr,
            shared,
            thread: Some(thread),
        }
    }

    /// Where to dial.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Changes the path for what comes from now on.
    pub fn set(&self, path: Path) {
        *self.shared.path.lock().expect("no panic") = path;
    }

    /// From now on datagrams reach the listener from other ports.
    pub fn change_ports(&self) {
        self.shared.change_ports.store(true, Ordering::Release);
    }

    /// Datagrams passed on and dropped.
    pub fn counts(&self) -> (u64, u64) {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (of(&self.shared.relayed), of(&self.shared.dropped))
    }

    /// The largest datagram passed on since the last call.
    pub fn take_largest(&self) -> u64 {
        self.shared.largest_bytes.swap(0, Ordering::Relaxed)
    }
}

impl Drop for UdpRelay {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
    socket.set_nonblocking(true).expect("a socket option");
    let of = socket2::SockRef::from(&socket);
    // A relay that drops by itself would be a path nobody asked for.
    let _ = of.set_recv_buffer_size(4 << 20);
    let _ = of.set_send_buffer_size(4 << 20);
    socket
}

/// Towards the listener for one dialler, or back to that dialler.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    Forth(SocketAddr),
    Back(SocketAddr),
}

/// A datagram by when it is due and when it came.
type Waiting = (Instant, u64, Way, Vec<u8>);

struct Relay {
    front: UdpSocket,
    target: SocketAddr,
    shared: Arc<Shared>,
    diallers: HashMap<SocketAddr, UdpSocket>,
    waiting: BinaryHeap<Reverse<Waiting>>,
    order: u64,
    random: u64,
}

impl Relay {
    fn run(mut self) {
        let mut buffer = vec![0; 65_536];
        while !self.shared.stop.load(Ordering::Acquire) {
            if self.shared.change_ports.swap(false, Ordering::AcqRel) {
                self.diallers.values_mut().for_each(|s| *s = socket());
            }
            let moved = self.receive(&mut buffer) | self.send_due();
            if !moved {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    fn receive(&mut self, buffer: &mut [u8]) -> bool {
        let mut arrived = Vec::new();
        for _ in 0..64 {
            match self.front.recv_from(buffer) {
                Ok((n, from)) => arrived.push((Way::Forth(from), buffer[..n].to_vec())),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                // An unreachable port, told about something sent before.
                Err(_) => {}
            }
        }
        for (dialler, socket) in &self.diallers {
            for _ in 0..64 {
                match socket.recv_from(buffer) {
                    Ok((n, _)) => arrived.push((Way::Back(*dialler), buffer[..n].to_vec())),
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(_) => {}
                }
            }
        }
        let any = !arrived.is_empty();
        let path = *self.shared.path.lock().expect("no panic");
        for (way, bytes) in arrived {
            self.pass(&path, way, bytes);
        }
        any
    }

    fn pass(&mut self, path: &Path, way: Way, bytes: Vec<u8>) {
        let is_cut = match way {
            Way::Forth(_) => path.cut_forth,
            Way::Back(_) => path.cut_back,
        };
        let is_too_large = path.max_bytes.is_some_and(|max| bytes.len() > max);
        if is_cut || is_too_large || self.chance(path.loss_per_mille) {
            self.shared.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let mut due = Instant::now() + path.delay;
        if self.chance(path.late_per_mille) {
            due += Duration::from_millis(10);
        }
        if self.chance(path.doubled_per_mille) {
            self.wait(due, way, bytes.clone());
        }
        self.wait(due, way, bytes);
    }

    fn wait(&mut self, due: Instant, way: Way, bytes: Vec<u8>) {
        self.order += 1;
        self.waiting.push(Reverse((due, self.order, way, bytes)));
    }

    fn send_due(&mut self) -> bool {
        let mut any = false;
        while let Some(Reverse((due, ..))) = self.waiting.peek() {
            if *due > Instant::now() {
                break;
            }
            let Some(Reverse((_, _, way, bytes))) = self.waiting.pop() else {
                break;
            };
            any = true;
            self.shared.relayed.fetch_add(1, Ordering::Relaxed);
            let largest = &self.shared.largest_bytes;
            largest.fetch_max(bytes.len() as u64, Ordering::Relaxed);
            // A full or unreachable socket is one more way to lose a datagram.
            let _ = match way {
                Way::Forth(dialler) => {
                    let socket = self.diallers.entry(dialler).or_insert_with(socket);
                    socket.send_to(&bytes, self.target)
                }
                Way::Back(dialler) => self.front.send_to(&bytes, dialler),
            };
        }
        any
    }

    fn chance(&mut self, per_mille: u64) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % 1000 < per_mille
    }
}
