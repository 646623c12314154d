BEGIN TRANSACTION;
CREATE TABLE autofa_alembic_version (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT autofa_alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "autofa_alembic_version" VALUES('0001');
CREATE TABLE autofa_device (
	id INTEGER NOT NULL,
	kind VARCHAR(8) NOT NULL,
	name VARCHAR(255) NOT NULL,
	arch VARCHAR(255) NOT NULL,
	units INTEGER NOT NULL,
	memory_gib INTEGER NOT NULL,
	CONSTRAINT pk_autofa_device PRIMARY KEY (id),
	CONSTRAINT uq_autofa_device_kind_name_arch_units_memory_gib UNIQUE (kind, name, arch, units, memory_gib)
);
INSERT INTO "autofa_device" VALUES(1,'cuda','NVIDIA H200','sm_90',132,140);
INSERT INTO "autofa_device" VALUES(2,'cpu','Test CPU','x86-64-v4',2,0);
CREATE TABLE autofa_measurement (
	id INTEGER NOT NULL,
	content_hash VARCHAR(64) NOT NULL,
	device_id INTEGER NOT NULL,
	provenance_id INTEGER NOT NULL,
	created_at VARCHAR(40) NOT NULL,
	bucket VARCHAR(255) NOT NULL,
	problem VARCHAR(255) NOT NULL,
	slug VARCHAR(255) NOT NULL,
	family VARCHAR(255) NOT NULL,
	fingerprint VARCHAR(255) NOT NULL,
	status VARCHAR(32) NOT NULL,
	run VARCHAR(255) NOT NULL,
	time_ms DOUBLE,
	call_ms DOUBLE,
	time_spread DOUBLE,
	call_spread DOUBLE,
	time_p10 DOUBLE,
	time_p90 DOUBLE,
	call_p10 DOUBLE,
	call_p90 DOUBLE,
	samples INTEGER NOT NULL,
	baseline_time_ms DOUBLE,
	baseline_call_ms DOUBLE,
	error DOUBLE,
	message TEXT NOT NULL,
	seconds DOUBLE NOT NULL,
	CONSTRAINT pk_autofa_measurement PRIMARY KEY (id),
	CONSTRAINT uq_autofa_measurement_content_hash UNIQUE (content_hash),
	CONSTRAINT fk_autofa_measurement_device_id FOREIGN KEY(device_id) REFERENCES autofa_device (id),
	CONSTRAINT fk_autofa_measurement_provenance_id FOREIGN KEY(provenance_id) REFERENCES autofa_provenance (id)
);
INSERT INTO "autofa_measurement" VALUES(1,'524f76688f9b1fcd9c3b055df04fa6fbf8cd50631e6284de0a13e6307a1019c8',1,1,'2025-11-01T12:00:00+00:00','1,8,1024,64 f16 none','1,8,1024,64 f16 none','torch.sdpa','torch.sdpa','torch==2.13','ok','run-1',1.0,1.0,0.01,0.01,1.0,1.0,1.0,1.0,31,1.0,1.0,0.00125,'',0.5);
INSERT INTO "autofa_measurement" VALUES(2,'21dd3a2e9c7f676a30650fb2f8391f57b6c00df20710ff620ed9411de8e4c810',1,1,'2025-11-01T12:00:00+00:00','1,8,1024,64 f16 none','1,8,1024,64 f16 none','torch.flash','torch.flash','torch==2.13','ok','run-1',0.5,0.5,0.01,0.01,0.5,0.5,0.5,0.5,31,1.0,1.0,0.00125,'',0.5);
INSERT INTO "autofa_measurement" VALUES(3,'69ca68cbc7b2f9c836ef9baf2dc00b6b38339d20aff5fcd1598467fd087832a8',1,1,'2025-11-01T12:00:00+00:00','1,8,1024,64 f16 none','1,8,1024,64 f16 none','torch.cudnn','torch.cudnn','torch==2.13','crashed','run-1',NULL,NULL,0.01,0.01,NULL,NULL,NULL,NULL,0,1.0,1.0,0.00125,'it crashed',0.5);
INSERT INTO "autofa_measurement" VALUES(4,'af04f75afd7f451a714d0fd3922ba7c02d6b37aa5404b4135fd4b6b2c715d59d',1,1,'2025-11-01T12:03:00+00:00','1,8,1024,64 f16 none','1,8,1000,64 f16 none','torch.efficient','torch.efficient','torch==2.13','ok','run-1',0.75,0.75,0.01,0.01,0.75,0.75,0.75,0.75,31,1.0,1.0,NULL,'',0.5);
INSERT INTO "autofa_measurement" VALUES(5,'012e9dc88c70abc9258035f684321364da03fb5c76275669b3939146b49ce27f',2,1,'2025-11-01T12:00:00+00:00','1,8,1024,64 f32 causal','1,8,1024,64 f32 causal','cpu.flash-d64-x','cpu.flash','torch==2.13','ok','run-2',0.25,0.25,0.01,0.01,0.25,0.25,0.25,0.25,31,1.0,1.0,0.00125,'odd: ''; 😀
',0.5);
CREATE TABLE autofa_provenance (
	id INTEGER NOT NULL,
	digest VARCHAR(64) NOT NULL,
	document TEXT NOT NULL,
	CONSTRAINT pk_autofa_provenance PRIMARY KEY (id),
	CONSTRAINT uq_autofa_provenance_digest UNIQUE (digest)
);
INSERT INTO "autofa_provenance" VALUES(1,'b8c448efd11eda7b01eff94ad630e79b9d7eb3a0aa842756289c106a22218e11','{"autofa": "0.1.0", "torch": "2.13.0+cu130", "cuda": "13.0", "driver": "580.1", "compiler": "nvcc 13.0.88", "host": "host", "details": "{\"sm_clock_mhz\": 1980}"}');
CREATE INDEX ix_autofa_measurement_device_id_bucket_slug ON autofa_measurement (device_id, bucket, slug);
CREATE VIEW autofa_dispatch AS
SELECT m.id, (SELECT version_num FROM autofa_alembic_version) AS revision,
       d.kind, d.name, d.arch, d.units, d.memory_gib,
       m.problem, m.created_at, p.document AS provenance,
       m.slug, m.family, m.fingerprint, m.status, m.run,
       m.time_ms, m.call_ms, m.time_spread, m.call_spread,
       m.time_p10, m.time_p90, m.call_p10, m.call_p90,
       m.samples, m.baseline_time_ms, m.baseline_call_ms, m.error, m.message, m.seconds
FROM autofa_measurement m
JOIN autofa_device d ON d.id = m.device_id
JOIN autofa_provenance p ON p.id = m.provenance_id
WHERE m.status = 'ok' AND (m.device_id, m.bucket, m.slug, m.fingerprint) NOT IN (
    SELECT f.device_id, f.bucket, f.slug, f.fingerprint
    FROM autofa_measurement f
    WHERE f.status NOT IN ('ok', 'pruned') AND NOT EXISTS (
        SELECT 1 FROM autofa_measurement g
        WHERE g.device_id = f.device_id AND g.bucket = f.bucket AND g.slug = f.slug
          AND g.fingerprint = f.fingerprint AND g.status = 'ok' AND g.created_at > f.created_at
          AND g.problem = f.problem
    )
);
COMMIT;
